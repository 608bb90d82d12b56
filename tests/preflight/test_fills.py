"""What is there when the memory is fullest."""
# ruff: noqa: E501

from pathlib import Path

import jax

from replicax._src.preflight.hlo import Hlo
from replicax._src.preflight.memory import Buffer, largest

PROGRAM = """\
HloModule jit_flat, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "JAX/_src/x.py"
2 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %wide = f32[1024,256]{1,0} broadcast(%x), dimensions={1}, metadata={op_name="jit(f)/while/body/wide" stack_frame_id=2}
  %fast = f32[1024,256]{1,0:T(8,128)S(1)} negate(%wide)
  %y = f32[256]{0} reduce(%fast), to_apply=%add
  ROOT %t = (s32[], f32[256]{0}) tuple(%i, %y)
}

%condition (q: (s32[], f32[256])) -> pred[] {
  %q = (s32[], f32[256]{0}) parameter(0)
  ROOT %k = pred[] constant(false)
}

ENTRY %main (w: f32[512,256], b: f32[256]) -> (f32[512,256], f32[256]) {
  %w = f32[512,256]{1,0} parameter(0), metadata={op_name="leaves[0]"}
  %b = f32[256]{0} parameter(1), metadata={op_name="leaves[1]"}
  %g = f32[512,256]{1,0} broadcast(%b), dimensions={1}, metadata={op_name="jit(f)/gradient" stack_frame_id=1}
  %r = f32[512,256]{1,0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/psum" stack_frame_id=1}
  %zero = s32[] constant(0)
  %start = (s32[], f32[256]{0}) tuple(%zero, %b)
  %loop = (s32[], f32[256]{0}) while(%start), condition=%condition, body=%body
  %c = f32[256]{0} get-tuple-element(%loop), index=1
  %new = f32[512,256]{1,0} subtract(%w, %r)
  ROOT %out = (f32[512,256]{1,0}, f32[256]{0}) tuple(%new, %c)
}
""".replace("JAX/", f"{Path(jax.__file__).parent}/")


def test_the_largest_are_named_with_the_lines_that_make_them():
    found = largest(Hlo(PROGRAM), ["weight", "bias"])

    assert found == (
        # Inside of the loop; the line is the program's own, not the library's that it called.
        Buffer(1024 * 256 * 4, "wide f32[1024,256]", "/home/me/train.py:7"),
        Buffer(512 * 256 * 4, "weight f32[512,256]"),
        # The sum takes the place of the gradient, and the new weight that of the old.
        Buffer(512 * 256 * 4, "psum f32[512,256]", "/home/me/train.py:7"),
        Buffer(256 * 4, "bias f32[256]"),
    )


def test_only_so_many_are_given_and_of_nothing_none():
    assert len(largest(Hlo(PROGRAM), (), count=2)) == 2
    assert largest(Hlo(PROGRAM), ())[1].what == "input 0 f32[512,256]"
    assert largest(Hlo(""), ()) == ()
