"""Tests that the documents name what is there: files, tests, settings, flags, log lines, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.documents import code_blocks

import torchft_svc.client
import torchft_svc.coordination
import torchft_svc.elastic
import torchft_svc.testing
import torchft_svc.trainer
from tools.docs.__main__ import generated
from tools.docs.settings import variables
from torchft_svc.buddy import cli as buddy_cli
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.elastic.run import get_args_parser
from torchft_svc.env import Environment
from torchft_svc.lighthouse_server import cli as lighthouse_cli
from torchft_svc.lighthouse_server.operator_commands import OPERATOR_COMMANDS as LIGHTHOUSE_COMMANDS
from torchft_svc.manager_server import cli as manager_cli
from torchft_svc.manager_server.operator_commands import OPERATOR_COMMANDS as MANAGER_COMMANDS
from torchft_svc.settings import (
    DEFAULT_HEARTBEAT_INTERVAL,
    LOCAL_LIGHTHOUSE,
    resolve_checks,
    resolve_timeouts,
)

ROOT = Path(__file__).parents[1]
OPERATIONS, PARTS = ROOT / "docs" / "operations.md", ROOT / "docs" / "api" / "index.md"
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
TREES = ("torchft_svc", "tests", "tools", "examples", "deploy", "docs", "proto")
# What was called so is called by its term of the glossary now.
SYNONYMS = [
    *["deeds?", "crews?", "fellows?", "lookout", "nursery", "graveyard", "strays?", "residents"],
    *["whereabouts", "outlook", "keeper", "books"],
]
PUBLIC = (
    torchft_svc,
    torchft_svc.coordination,
    torchft_svc.elastic,
    torchft_svc.testing,
    torchft_svc.trainer,
)
# Pages about programs that have flags of their own.
OTHER_FLAGS_PAGES = ("benchmarks.md", "elastic.md", "trainer.md")
# What only the benchmarks read, and what stands for several.
OTHER_SETTINGS = {"TORCHFT_PEER_PYTHON", "TORCHFT_TLS"}
OTHER_FLAGS = {
    "--help",
    "--max-restarts",
    "--build",
    "--no-deps",
    "--prefix",
    "--target",
    "--hypothesis-profile",
} | {
    "--replace",  # of `python -m torchft_svc.compat`
    "--allow-incomplete-ranks",  # of the analyzer of flight records
    "--signal",  # of Slurm
    "--from-literal",  # of kubectl
    "--ready-file",  # of an example
    *("--requeue", "--nodes", "--gpus-per-node"),  # of Slurm
    *("--max-requeues", "--state-dir"),  # of our runner there
    *("--env", "--workers", "--max"),  # of TorchX, in part: its names have underscores
    *("--rdzv-endpoint", "--rdzv-conf", "--local-addr"),  # of torchrun
}


def quoted(text: str) -> list[str]:
    """What stands in backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def section(text: str, title: str) -> str:
    _, _, rest = text.partition(f"\n## {title}\n")
    assert rest, f"there is no section {title!r}"
    return rest.split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_test_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    missing = []
    for title in ("When something fails", "Invariants"):
        found = rows(section(text, title))
        assert len(found) > 5
        for *_, cell in found:
            named = [each for each in quoted(cell) if "test" in each or each.startswith("check")]
            for each in named:
                path, _, function = each.partition("::")
                if path.startswith("check"):
                    path, function = "", path
                holds = [code for file, code in tests.items() if str(file).endswith(path)]
                begins = f"def {function.removesuffix('...')}"
                if not any(begins in code for code in holds):
                    missing.append(each)
            assert named or "the demo" in cell, f"no test checks: {cell}"
    assert not missing


def rules_of(path: Path) -> list[str]:
    """The rules that a page of the design fixes, in its order."""
    return re.findall(r"^\*\*([A-Z]\d+)\. ", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DESIGN, ids=lambda path: path.name)
def test_the_rules_of_a_page_are_numbered(path: Path) -> None:
    rules = rules_of(path)
    assert rules
    assert rules == [f"{rules[0][0]}{number}" for number in range(1, len(rules) + 1)]
    assert f"{rules[0]} to {rules[-1]}" in (ROOT / "ARCHITECTURE.md").read_text()


def test_every_rule_that_is_cited_is_there() -> None:
    rules = {rule for path in DESIGN for rule in rules_of(path)}
    assert len(rules) == sum(len(rules_of(path)) for path in DESIGN), "no two have one number"
    letters = "".join(sorted({rule[0] for rule in rules}))
    cited: dict[str, str] = {}
    for tree in ("torchft_svc", "tests", "tools"):
        for file in (ROOT / tree).rglob("*.py"):
            text = file.read_text()
            for clause in re.findall(r"\brules?\s+((?:[A-Z]\d+(?:, | and | to |,\s)?)+)", text):
                cited |= dict.fromkeys(re.findall(r"[A-Z]\d+", clause), file.name)
            named = re.findall(rf"def test_([{letters.lower()}]\d+)_", text)
            cited |= {rule.upper(): file.name for rule in named if rule[0] != "i"}
    for path in DESIGN:
        for rule in re.findall(rf"\b[{letters}]\d+\b", path.read_text()):
            cited[rule] = path.name
    assert not {rule: where for rule, where in cited.items() if rule not in rules}
    assert len(cited) > 60


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_file_that_is_named_is_there(path: Path) -> None:
    there = [*ROOT.glob("*.*"), *(file for tree in TREES for file in (ROOT / tree).rglob("*.*"))]
    named = {word.partition("::")[0].split()[0] for word in quoted(path.read_text())}
    files = {each for each in named if re.fullmatch(r"[\w/.-]+\.(py|md|proto|yml|toml|txt)", each)}
    assert not {each for each in files if not any(str(file).endswith(f"/{each}") for file in there)}


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menus = "\n".join(block.text for path in DOCS for block in code_blocks(path))
    root = ROOT / "docs"
    pages = {page.relative_to(root).with_suffix("").as_posix() for page in root.rglob("*.md")}
    pages -= {"index", *(page for page in pages if page.startswith("design/"))}
    entries = set(re.findall(r"^(?:.* <)?([\w./-]+)>?$", menus, re.MULTILINE))
    absent = {page for page in pages if not {page, page.partition("/")[2]} & entries}
    assert not absent, "add them to a toctree, such as those at the end of docs/index.md"


def test_no_document_names_a_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(root|home|work|tmp|opt)/|https?://")
    assert not [
        (path.name, found[0]) for path in DOCS if (found := pattern.search(path.read_text()))
    ]


def test_what_is_generated_is_up_to_date() -> None:
    stale = [path for path, text in generated().items() if (ROOT / path).read_text() != text]
    assert not stale, "run `python -m tools.docs`"


def test_every_setting_of_ours_has_a_default() -> None:
    ours = [each for each in variables() if each.names[0].startswith("TORCHFT_")]
    assert len(ours) > 20
    assert not [each.names[0] for each in ours if not each.default]


def test_the_defaults_are_those_of_the_code() -> None:
    said = {each.names[0]: each.default for each in variables()}
    nothing = Environment({})
    durations = resolve_timeouts(
        nothing,
        timeout=None,
        quorum_timeout=None,
        connect_timeout=None,
        heartbeat_interval=DEFAULT_HEARTBEAT_INTERVAL,
    )
    assert said["TORCHFT_TIMEOUT_SEC"] == f"{durations.collective_s:g} s"
    assert said["TORCHFT_QUORUM_TIMEOUT_SEC"] == f"{durations.quorum_s:g} s"
    assert said["TORCHFT_CONNECT_TIMEOUT_SEC"] == f"{durations.connect_s:g} s"
    checks = resolve_checks(nothing, None, None)
    assert said["TORCHFT_CHECK_EVERY"] == f"{checks.check_every}"
    assert said["TORCHFT_ON_DIFFERENCE"] == f"`{checks.on_difference}`"
    assert said["TORCHFT_JOB_ID"] == f"`{DEFAULT_JOB}`"
    assert said["TORCHFT_LIGHTHOUSE"].endswith(LOCAL_LIGHTHOUSE.rpartition(":")[2])


def test_the_pages_name_settings_that_exist() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text()
    for path in DOCS:
        if path.name not in ("CHANGELOG.md", "settings.md"):
            named = set(re.findall(r"TORCHFT_[A-Z_]*[A-Z]", path.read_text())) - OTHER_SETTINGS
            assert not {name for name in named if f"`{name}`" not in settings}, path.name


def flags_of(*commands: click.Command) -> set[str]:
    return {
        flag
        for command in commands
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def test_the_flags_are_those_of_the_commands() -> None:
    mains = (lighthouse_cli.main, manager_cli.main, buddy_cli.main)
    ours = flags_of(*mains, *LIGHTHOUSE_COMMANDS, *MANAGER_COMMANDS)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/failures").glob("*")]
    for path in sorted({*pages} - {ROOT / "docs" / name for name in OTHER_FLAGS_PAGES}):
        text = path.read_text()
        commands = re.findall(r"^(?:lighthouse|torchft-manager) .*", text, re.MULTILINE)
        named = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", "\n".join([*quoted(text), *commands])))
        assert named - ours <= OTHER_FLAGS | launcher_flags(), path.name


def launcher_flags() -> set[str]:
    actions = get_args_parser()._actions
    return {option for action in actions for option in action.option_strings}


def test_the_flags_of_the_elastic_page_are_those_of_the_launcher_and_the_examples() -> None:
    examples = [ROOT / "examples" / name for name in ("soft_restart.py", "train_hsdp.py")]
    text = "".join(example.read_text() for example in examples)
    ours = launcher_flags() | set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    ours |= flags_of(lighthouse_cli.main, *LIGHTHOUSE_COMMANDS)
    text = (ROOT / "docs" / "elastic.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= ours


def test_the_elastic_page_names_every_function_of_the_worker_api() -> None:
    text = (ROOT / "docs" / "elastic.md").read_text()
    missing = [name for name in torchft_svc.elastic.__all__ if name not in text]
    assert set(missing) == {"WorkerState", "WorldChangeEvent"}  # it has their values


def test_the_log_lines_are_those_of_the_code() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "torchft_svc").rglob("*.py"))
    found = rows(section(OPERATIONS.read_text(), "What the log says"))
    assert len(found) > 10
    for cell, *_ in found:
        for line in quoted(cell):
            words = re.split(r"\.\.\.|\b[A-Z]\b|=|\d+", line)
            assert all(word.strip(" :") in code for word in words), line


def test_the_names_of_the_parts_can_be_imported() -> None:
    modules = (torchft_svc.client, torchft_svc.coordination, torchft_svc.testing)
    parts = PARTS.read_text()
    found = rows(parts)
    for cell, *_ in found:
        for word in quoted(cell):
            name = re.split(r"[(.]", word)[0]
            if name[0].isupper() or "_" in name.removeprefix("torchft_svc"):
                assert any(hasattr(module, name) for module in modules), word
    _, _, in_short = parts.partition("`Manager` in short")
    methods = re.findall(r"`(\w+)`", in_short)
    assert len(methods) > 10
    assert not [name for name in methods if not hasattr(torchft_svc.client.Manager, name)]


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    found = set(re.findall(r"auto(?:class|function):: (\w+)", pages)) | {"OptimizerWrapper"}
    for module in PUBLIC:
        absent = set(module.__all__) - found
        assert not absent, f"add those of {module.__name__} to a page of docs/api: {absent}"


def sources(*trees: str) -> dict[Path, str]:
    """The text of each source file in ``trees``, without what is generated."""
    files = [file for tree in trees for file in sorted((ROOT / tree).rglob("*.py"))]
    return {file: file.read_text() for file in files if file.parent.name != "proto"}


def test_every_term_of_the_glossary_occurs_in_the_code() -> None:
    code = "\n".join(sources("torchft_svc", "tools/sim").values())
    found = rows(section((ROOT / "ARCHITECTURE.md").read_text(), "Glossary"))
    assert len(found) > 20
    assert not [term for term, name, _ in found if quoted(name)[0] not in code]
    terms = [term for cell, *_ in found for term in cell.split(", ")]
    assert len(set(terms)) == len(terms)


def test_no_synonym_of_a_term_is_used() -> None:
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(SYNONYMS)})(?![a-z])", re.IGNORECASE)
    texts = sources(*TREES[:-2]) | {path: path.read_text() for path in DOCS}
    del texts[ROOT / "tests" / "test_docs.py"], texts[ROOT / "CHANGELOG.md"]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts.items()
        for match in pattern.finditer(text)
    ]
    assert not found
    assert not [path for path in texts if pattern.search(path.name)]


# A docstring's first line is read alone, in an editor's hover: it does not continue the name.
FRAGMENT = re.compile(
    r"(?:Of|As|It|Its|They|Their|Theirs|Ours|That|With|At once|So (?:long|often|far|many|much)|By"
    r"|Nobody|No one|Nothing|Has|Have|Is|Are|Was|Were|Does|Until|For|From|In|Into|On|To|If|When"
    r"|Where|While|Who|Because|But|And|Or|Also|Only|Even|Not|Without|Within|After|Before|Instead"
    r"|Among|Between|Against|Then|There|Here|Too|Unless|Since|Once|Again|Still|Already|Now|Never"
    r"|Always|Maybe|Perhaps|Neither)\b"
)
# Components send, receive, report and record.
DIALECT = re.compile(
    r"(?<![a-z])(?:tells?|telling|told|hears?|hearing|heard|heeds?|heeded)(?![a-z])"
)
# Such a name alone could mean anything, and a search finds too much.
BARE_VERBS = {
    *("tell", "hear", "heed", "miss", "take", "follow", "carry", "carry_out", "look", "go_on"),
    *("give", "have", "begin", "note", "settle", "see", "say", "said", "taken"),
}
# Reasons that tests make up, and expect in a message.
SAMPLE_REASONS = ('"told so"',)
# What users and maintainers read.
PROSE = ("torchft_svc", "tools", "examples")


def documented(code: str) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(ast.parse(code)) if isinstance(node, kinds))  # type: ignore[misc]


def test_the_first_line_of_a_docstring_reads_alone() -> None:
    assert not [
        f"{path.relative_to(ROOT)}: {first}"
        for path, code in sources(*PROSE, "tests").items()
        for node in documented(code)
        for first in (ast.get_docstring(node) or "").split("\n")[:1]
        if FRAGMENT.match(first)
    ]


def test_components_send_and_receive() -> None:
    texts = sources(*PROSE, "tests") | {path: path.read_text() for path in DOCS}
    del texts[ROOT / "tests" / "test_docs.py"]
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.split("\n"), 1)
        if DIALECT.search(line.lower()) and not any(each in line for each in SAMPLE_REASONS)
    ]


def test_the_name_of_a_function_has_an_object() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path, code in sources(*PROSE).items()
        for node in documented(code)
        if not isinstance(node, ast.Module) and node.name.strip("_") in BARE_VERBS
    ]


def test_the_functions_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = "\n".join(sources("torchft_svc", "tools", "tests").values())
    named = [name for name in quoted(text) if re.fullmatch(r"\w+\(\)", name)]
    assert len(named) > 5
    assert not [name for name in named if f"def {name[:-2]}(" not in code]


def test_the_changelog_is_short_enough_to_be_read() -> None:
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert versions
    too_long = [each.split("\n")[0] for each in versions if len(each.splitlines()) > 80]
    assert not too_long
