"""What docs/speed.md says is what the records say; the programs that write them run."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from collab import fused_projection
from collab.records import read_records
from collab.rivals import Rival, Setting, fill_
from collab.speed_records import latest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("matplotlib")

import bench_attention  # noqa: E402
import bench_kernels  # noqa: E402
import bench_parts  # noqa: E402
import bench_widths  # noqa: E402
import speed_tables  # noqa: E402
import table1 as table1_program  # noqa: E402


def program(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Records of a quick run on the CPU, and what it printed."""
    path = tmp_path_factory.mktemp("records") / "attention.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        arguments = (
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--threads",
            1,
            "--quick",
            "--no-compile",
            "--commit",
            "abc",
        )
        program(bench_attention, patch, "--output", path, *arguments)
    return path


def test_the_benchmark_measures_every_case_and_pass(quick):
    records = read_records(quick)
    assert {record.config["pass"] for record in records} == {"inference", "training", "decode"}
    assert {(record.config["batch"], record.config["tokens"]) for record in records} == set(bench_attention.QUICK_CASES)
    kinds = {(record.config["kind"], record.config["asked"]) for record in records}
    assert {
        ("ordinary", "default"),
        ("collaborative", "auto"),
        ("collaborative", "sdpa"),
        ("one key head", "default"),
    } <= kinds
    sparse = [record for record in records if record.config["dims_per_head"]]
    assert {record.config["tokens"] for record in sparse} == {bench_attention.QUICK_CASES[1][1]}
    for record in records:
        assert record.metrics["ratio"] > 0
        assert record.metrics["milliseconds"] > 0
        assert record.metrics["error"] is None or record.metrics["error"] < 1e-5
        assert record.provenance["commit"] == "abc"
        assert "torch" in record.provenance["versions"]


def test_the_summary_has_a_line_for_everything(quick):
    text = bench_attention.summary(read_records(quick))
    assert text.count("ordinary") == 6
    assert text.count("    auto") == text.count("    sdpa") == 6
    assert text.count("    one key head") == 4
    assert "24/16" in text


def test_cases_and_sizes_can_be_chosen(tmp_path, monkeypatch, capsys):
    path = tmp_path / "some.jsonl"
    program(bench_attention, monkeypatch, "--output", path, "--device", "cpu", "--quick", "--no-compile", "--only-ours",
            "--dtype", "float32", "--cases", "1x7", "--passes", "inference", "--sizes", "16",
            "--implementations", "reference", "--verbose")  # fmt: skip
    records = read_records(path)
    assert {record.config["tokens"] for record in records} == {7}
    assert {record.config["shared_dim"] for record in records} == {None, 16}
    assert "collaborative 16, reference [reference]: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program(bench_attention, monkeypatch, "--output", path, "--passes", "both")
    assert "--passes must be of inference, training, decode, got both" in capsys.readouterr().err


def test_one_key_head_computes_what_the_definition_does():
    setting = Setting(batch=2, tokens=7, width=48, num_heads=3)
    inputs, _ = setting.inputs()
    layer = bench_attention.CollaborativeAttention(48, 3, 13, implementation="reference")
    fill_(layer, 0)
    for backend in ("default", "math"):
        found = bench_attention.OneKeyHead(layer, backend, is_given_once=False)
        torch.testing.assert_close(found(inputs), layer(inputs))
    (rival, *_) = bench_attention.one_key_rivals(setting, inputs, None, (16, None))
    assert isinstance(rival, Rival)
    assert bench_attention.one_key_rivals(setting, inputs, None, (16, 8)) == []  # of sparse layers there is none
    assert bench_attention.one_key_rivals(setting, inputs, None, (3, None)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("module", [bench_attention, bench_kernels, bench_parts, table1_program])
def test_programs_say_that_there_is_no_device(module, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        program(module, monkeypatch, "--output", tmp_path / "none.jsonl", "--device", "cuda")
    assert "--device must be cpu where there is no CUDA device, got cuda" in capsys.readouterr().err


def test_table_1_is_measured_and_recorded(tmp_path, monkeypatch, capsys):
    from collab import table1

    printed = table1.published()
    small = printed | {"batch": 2, "tokens": 9, "width": 24, "num_heads": 3, "rows": printed["rows"][:2]}
    monkeypatch.setattr(table1, "published", lambda: small)
    path = tmp_path / "table1.jsonl"
    program(table1_program, monkeypatch, "--output", path, "--threads", 1, "--repeats", 2)
    records = read_records(path)
    assert {record.name for record in records} == {"table1"}
    assert {record.config["pass"] for record in records} == {"inference", "training"}
    assert "V100, paper" in capsys.readouterr().out
    shown = speed_tables.paper(records)
    assert "| 64 | " in shown
    assert "| 1.75 (x 0.77) |" in shown


def test_parts_are_measured_beside_what_the_device_allows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "parts.jsonl"
    program(
        bench_parts, monkeypatch, "--output", path, "--device", "cpu", "--dtype", "float32", "--threads", 1, "--quick"
    )
    assert "at most " in capsys.readouterr().out
    records = read_records(path)
    layers = {(record.config["pass"], record.config["kind"], record.config["part"]) for record in records}
    assert layers == {
        ("inference", "ordinary", "projection"), ("inference", "ordinary", "output"),
        ("inference", "ordinary", "attention"), ("inference", "collaborative", "projection"),
        ("inference", "collaborative", "attention"), ("training", "ordinary", "projection"),
        ("training", "ordinary", "output"), ("training", "ordinary", "attention"),
        ("training", "collaborative", "projection"), ("training", "collaborative", "attention"),
    }  # fmt: skip
    projection = records[0]
    assert projection.metrics["flops"] == 2 * 32 * 48 * 144
    assert projection.metrics["bytes"] == 4 * (32 * 48 + 48 * 144 + 32 * 144)
    table = speed_tables.parts(records)
    # A line a layer: ordinary, two sizes, and a sparse one; two cases; two passes.
    assert len(table.splitlines()) == 2 + 4 * 2 * 2 + 4
    assert "A large product reached" in table
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| inference")]
    fastest = {part: min(found) for part, found in _milliseconds_of_parts(records).items()}
    assert rows[0][2] == "ordinary"
    assert (rows[0][7], rows[0][8], rows[0][10]) == (f"{sum(fastest.values()) * 1e3:.1f}", "1.00", "1.00")
    assert all(row[6] == rows[0][6] for row in rows[:4]), "one output projection for all"


def _milliseconds_of_parts(records):
    """Of ordinary attention, in the first case."""
    found = {}
    for record in records:
        config = record.config
        if (config["kind"], config["pass"], config["tokens"]) == ("ordinary", "inference", records[0].config["tokens"]):
            found.setdefault(config["part"], []).append(record.metrics["milliseconds"])
    return found


def test_parts_read_what_the_layer_lays_out(monkeypatch):
    seen = []
    monkeypatch.setattr(fused_projection, "DEVICES", {"cpu"})
    monkeypatch.setattr(
        bench_parts.ops, "attention", lambda *tensors, **options: seen.append(tensors) or (tensors[2], None)
    )
    for part in bench_parts.parts_of(Setting(batch=2, tokens=5, **bench_attention.QUICK), (20, None)):
        part.run()
    ((query, key, value, _),) = seen
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert all(part.storage_offset() % 8 == 0 and part.stride(1) % 8 == 0 for part in (query, key, value))


def test_a_layer_whose_attention_was_not_measured_has_no_line(tmp_path, monkeypatch):
    path = tmp_path / "parts.jsonl"
    options = ("--device", "cpu", "--dtype", "float32", "--quick", "--passes", "inference", "--cases", "2x16")
    program(bench_parts, monkeypatch, "--output", path, *options)
    records = read_records(path)
    left = [each for each in records if (each.config["shared_dim"], each.config["part"]) != (24, "attention")]
    table = speed_tables.parts(left)
    assert "collaborative 16 |" in table
    assert "collaborative 24 |" not in table


def test_kernels_are_profiled_and_shown(tmp_path, monkeypatch, capsys):
    path = tmp_path / "kernels.jsonl"
    program(bench_kernels, monkeypatch, "--output", path, "--device", "cpu", "--dtype", "float32", "--quick",
            "--commit", "abc")  # fmt: skip
    assert "collaborative 24/16" in capsys.readouterr().out
    records = read_records(path)
    assert {record.config["pass"] for record in records} == {"inference", "training"}
    assert all(record.metrics["microseconds"] > 0 and record.metrics["calls"] > 0 for record in records)
    assert any(record.config["kernel"] == "addmm" for record in records)
    table = speed_tables.kernels(records)
    assert table.count("| all |") == 3 + 4
    assert "float32; commit abc; cpu (" in table
    assert speed_tables.kernels([]) == speed_tables.NOTHING


def test_few_kernels_have_a_line_and_the_rest_share_one(quick):
    first = read_records(quick)[0]
    config = first.config | {"kind": "ordinary", "shared_dim": None, "dims_per_head": None}
    made = [
        replace(first, config=config | {"kernel": f"kernel{place}"}, metrics={"calls": 2, "microseconds": place + 1.0})
        for place in range(speed_tables.MOST_KERNELS + 3)
    ]
    rows = [line.strip("| ").split(" | ")[3:] for line in speed_tables.kernels(made).splitlines() if "ordinary" in line]
    assert rows[0] == ["all", "22", "66.0"]
    assert rows[1] == ["`kernel10`", "2", "11.0"]
    assert rows[-1] == ["others", "6", "6.0"]
    assert len(rows) == speed_tables.MOST_KERNELS + 2


def test_names_of_kernels_are_short():
    names = {
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": (
            "vectorized_elementwise_kernel"
        ),
        "void (anonymous namespace)::reduce_kernel<512>(int)": "reduce_kernel",
        "aten::addmm": "addmm",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT",
        "short_backward_kernel": "short_backward_kernel",
    }
    assert {name: bench_kernels.shorten(name) for name in names} == names


def test_goals_stand_beside_what_was_reached(quick):
    first = next(record for record in read_records(quick) if record.config["kind"] == "collaborative")
    case = {"pass": "training", "batch": 32, "tokens": 128, "asked": "auto", "dims_per_head": None, "device": "a GPU"}
    made = [
        replace(first, config=first.config | case | {"shared_dim": size}, metrics=first.metrics | {"ratio": ratio})
        for size, ratio in ((64, 0.79), (128, 0.95))
    ]
    (row,) = [line for line in speed_tables.goals(made).splitlines() if "| training |" in line]
    assert row.strip("| ").split(" | ")[2:6] == ["**0.790** of 0.80", "0.950 of 0.90", "at most 1.15", "at most 1.35"]
    assert speed_tables.goals([first]) == speed_tables.NOTHING


def test_widths_of_keys_are_measured(monkeypatch, capsys):
    options = ("--cases", "1x8", "--widths", "8,16", "--device", "cpu", "--backend", "default", "--dtype", "float32")
    program(bench_widths, monkeypatch, *options)
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "training, 12 keys" in heading
    assert [line.split()[:2] for line in lines] == [["1x8", "8"], ["1x8", "16"]]


# Tables.


def test_tables_hold_every_figure(quick):
    records = read_records(quick)
    table = speed_tables.ratios("inference")(records)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == ["2 x 16", "1 x 40"]
    heading = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    assert heading == ["batch x tokens", "ordinary ms", "by", "16", "24", "24, 16 a head"]
    assert "float32; commit abc; cpu (" in table
    chosen = next(
        record for record in latest(records)
        if record.config["pass"] == "inference" and record.config["asked"] == "auto" and record.config["tokens"] == 40
        and record.config["dims_per_head"]
    )  # fmt: skip
    assert f"{chosen.metrics['ratio']:.2f}" in table
    ways = speed_tables.ways(records)
    assert ways.count("one key head in ordinary kernels") == ways.count("`sdpa`") == 4
    decoding = speed_tables.decoding(records).splitlines()
    assert len(decoding) == 2 + 2 * 2 + 1 + 2
    assert decoding[2].startswith("| 2 x 16 | 16 | ")
    assert decoding[2].endswith(f"| {(16 + 3 + 48) / 96:.2f} |")
    assert len(speed_tables.memory(records).splitlines()) == 2 + 4 + 2


def test_what_is_faster_is_bold(quick):
    record = next(record for record in read_records(quick) if record.config["shared_dim"])
    faster = replace(record, metrics=record.metrics | {"ratio": 0.987, "flop_ratio": 0.5})
    slower = replace(record, metrics=record.metrics | {"ratio": 1.0, "flop_ratio": 0.5})
    assert speed_tables._ratio(faster) == "**0.99** (0.50)"
    assert speed_tables._ratio(slower) == "1.00 (0.50)"
    assert speed_tables._ratio(None) == ""


def test_where_nothing_is_measured_tables_say_so():
    assert {render([]) for _, render in speed_tables.TABLES.values()} == {speed_tables.NOTHING}
    assert speed_tables.figure([]) == speed_tables.NOTHING


def test_the_document_holds_the_tables_of_the_records():
    document = speed_tables.DOCUMENT.read_text(encoding="utf-8")
    for name, part in speed_tables.written().items():
        assert speed_tables.table_in(document, name) == part, f"{name}: run python benchmarks/speed_tables.py"


def labels(path):
    return sorted("".join(item.itertext()) for item in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))


def test_the_figure_is_that_of_the_records(tmp_path):
    records = speed_tables.recorded("attention")
    if not records:
        assert not speed_tables.FIGURE.exists()
        return
    text = speed_tables.FIGURE.read_text(encoding="utf-8")
    assert f"from records {speed_tables.digest(speed_tables._drawn(records))} " in text
    speed_tables.draw(records, tmp_path / "speed.svg")
    assert labels(speed_tables.FIGURE) == labels(tmp_path / "speed.svg")
    assert len(text) < 150_000


def test_everything_is_put_between_its_own_markers(quick, tmp_path, monkeypatch):
    names = [*speed_tables.TABLES, "figure"]
    text = "a\n" + "".join(f"{speed_tables.begin(name)}stale\n{speed_tables.END}b\n" for name in names)
    (tmp_path / "speed.md").write_text(text)
    monkeypatch.setattr(speed_tables, "DOCUMENT", tmp_path / "speed.md")
    monkeypatch.setattr(speed_tables, "FIGURE", tmp_path / "speed.svg")
    monkeypatch.setattr(speed_tables, "RESULTS", quick.parent)
    speed_tables.main()
    written = (tmp_path / "speed.md").read_text()
    assert "stale" not in written
    assert speed_tables.table_in(written, "table1") == speed_tables.NOTHING
    assert speed_tables.table_in(written, "ways") == speed_tables.ways(read_records(quick))
    svg = (tmp_path / "speed.svg").read_text()
    assert svg.count("drawn by benchmarks/speed_tables.py") == 1
    assert {"1 x 40 tokens, training", "collaborative attention", "operations: the floor"} <= set(
        labels(tmp_path / "speed.svg")
    )
    assert not re.search(r'href="(?!#|data:)', svg)
