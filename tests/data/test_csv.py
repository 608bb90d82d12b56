"""CSV files are cut into records and fields as TensorFlow cuts them, broken ones too."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from tests.golden.csv_cases import cases, outcome

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "csv.json").read_text())
CASES = cases()


def read(path, text, columns, *, ignores=False, **options):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    dataset = rx.data.experimental.CsvDataset(path, columns, **options)
    dataset = dataset.ignore_errors() if ignores else dataset
    return outcome(iter(dataset), rx.errors.InvalidArgumentError, list)


@pytest.mark.parametrize("part", range(20))
def test_files_give_the_records_and_errors_of_tensorflow(part, tmp_path):
    assert len(CASES) == len(ANSWERS)
    for case, answer in list(zip(CASES, ANSWERS, strict=True))[part::20]:
        columns = case.defaults(np.int32, np.float32, bytes)
        found = read(tmp_path / "a.csv", case.text, columns, **case.options)
        assert found == answer, case
        good = read(tmp_path / "a.csv", case.text, columns, ignores=True, **case.options)
        assert good == [record for record in answer if record != "error"], case


def test_a_stray_quote_costs_one_record(tmp_path):
    found = read(tmp_path / "a.csv", '1,a\n2,b"c\n3,d\n', [np.int32, bytes], ignores=True)
    assert found == [[1, "a"], [3, "d"]]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_records_that_lie_across_pieces_of_a_file_stay_whole(end, quote, tmp_path):
    field = f"{quote}ab{quote * 2}{end if quote else ''}c{quote}"
    record = f"{field},1{end}"
    wanted = [[field.strip('"').replace('""', '"'), 1]] * 2
    for before in range(len(record) + 1):  # what is left of a piece when the record begins
        filler = "x" * ((1 << 20) - before - len(f",0{end}")) + f",0{end}"
        found = read(tmp_path / "a.csv", filler + 2 * record, [bytes, np.int32])
        assert found[1:] == wanted, before


def test_a_number_too_large_for_a_float32_is_infinite_without_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / "a.csv", "1e39\n-1e39\n", [np.float32]) == [["inf"], ["-inf"]]
