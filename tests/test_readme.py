"""What README and docs show runs: Python blocks whole, commands by their names and options."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from eagle2 import cli, embedded

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
LINES = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ").splitlines()
COMMANDS = [line.split("#")[0].strip() for line in LINES if line.startswith("    ")]
GROUP = typer.main.get_command(cli.app)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    if "embedded" in block:
        try:
            embedded.gguf_file()
        except FileNotFoundError as error:
            pytest.skip(str(error))
    exec(compile(block, "block", "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) > 2


def commands(pattern):
    found = [match for line in COMMANDS if (match := re.match(pattern, line))]
    assert found
    return found


def test_commands_of_eagle2_have_these_options():
    for match in commands(r"(?:\.venv/bin/)?eagle2 (\w+)(.*)"):
        command = GROUP.commands[match[1]]
        known = {name for option in command.params for name in option.opts + option.secondary_opts}
        words = shlex.split(match[2])
        assert {word for word in words if word.startswith("--")} <= known, match[0]


def test_make_has_these_targets():
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for match in commands(r"(?:PYTHON=\S+ )?make ([\w -]+)"):
        assert set(match[1].split()) <= made, match[0]


def test_scripts_are_here():
    for match in commands(r"python (\S+\.py)"):
        assert (ROOT / match[1]).exists(), match[0]


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
