"""``replicax completion``: completion scripts for shells."""

import argparse
import sys

from replicax._src.cli import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(options: argparse.Namespace) -> int:
    """Print the script, which knows the commands and options of this version."""
    words = {
        verb: [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001
        for verb, parser in main.complete_parsers().items()
    }
    sys.stdout.write(_fish(words) if options.shell == "fish" else _bash(words, options.shell))
    return 0


def _bash(words: dict[str, list[str]], shell: str) -> str:
    cases = "\n".join(f"    {v}) options='{' '.join(o)}' ;;" for v, o in words.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{head}_replicax() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(words)} --help --version' -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _replicax replicax
"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c replicax -n __fish_use_subcommand -f -a {verb} -d '{main.VERBS[verb]}'"
        for verb in words
    ]
    for verb, options in words.items():
        where = f"-n '__fish_seen_subcommand_from {verb}'"
        for option in options:
            kind = "-l" if option.startswith("--") else "-s"
            lines.append(f"complete -c replicax {where} {kind} {option.lstrip('-')}")
    return "\n".join(lines) + "\n"
