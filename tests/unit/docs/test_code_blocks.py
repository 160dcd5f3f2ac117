"""Every code block of README.md and docs/*.md: Python runs, commands and their options exist."""

import itertools
import json
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from horovod_sparse.cli.main import main as horovod_sparse_command
from support.documents import PRELUDES, ROOT, Block, blocks
from support.jobs import ran

BLOCKS = list(blocks())
#: programs that are not ours, and whose options are not looked at
FOREIGN = {
    *("cd", "pip", "source", "export", "git"),
    *("conda", "micromamba", "docker", "kubectl", "sbatch", "srun", "salloc", "module"),
}
#: launchers: what comes behind their own options is a command, too
LAUNCHERS = {"horovodrun", "mpirun", "torchrun", "srun", "timeout"}


def test_every_block_says_what_it_is_and_yaml_can_be_read() -> None:
    assert len(BLOCKS) > 20
    for block in BLOCKS:
        known = ("", "python", "sh", "yaml", "dockerfile", "recipe")
        assert block.language in known, f"{block.place}: {block.language} is checked by no test"
        if block.language == "python":
            assert block.mark, f"{block.place}: say how it is run, <!-- run: ... -->, or why it is not"
            assert block.mark == "not run" or block.what in PRELUDES, block.place
    for block in BLOCKS:
        if block.language == "yaml":
            assert yaml.safe_load(block.text)["kind"], block.place


@pytest.mark.parametrize(
    "process", ["torch", pytest.param("tensorflow", marks=pytest.mark.tensorflow)], ids=str
)
def test_python_runs(process: str) -> None:
    if process == "tensorflow":
        pytest.importorskip("tensorflow")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = ran(sys.executable, "-m", "support.documents", process, PYTHONPATH=path)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert len(outcome) >= 4
    skipped = [place for place, text in outcome.items() if text == "skipped"]
    failed = [f"{place}\n{text}" for place, text in outcome.items() if text and place not in skipped]
    assert not failed, "\n".join(failed)
    if skipped:
        pytest.skip(f"TensorBoard is not installed: {', '.join(skipped)} did not run, all others did")


def commands(block: Block) -> list[list[str]]:
    found = []
    text = re.sub(r"\$\([^)]*\)", "VALUE", block.text.replace("\\\n", " "))
    for line in text.splitlines():
        for part in re.split(r"&&|\|\||;|\|", re.sub(r"(^| )#.*", "", line)):
            words = shlex.split(part)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


@cache
def help_of(*command: str) -> str:
    words = [ROOT / command[0]]
    if command[0] == "horovod-sparse":
        words = [sys.executable, "-m", "horovod_sparse", *command[1:]]
    elif command[0].endswith("bench") and len(command) > 1:
        words = [sys.executable, "-m", "benchmarks", command[1]]
    done = ran(*words, "--help", PYTHONPATH=str(ROOT))
    return done.stdout + done.stderr


def check(words: list[str]) -> None:
    name, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    options = [word.partition("=")[0] for word in rest if re.match(r"--\w", word)]
    if name == "horovod-sparse" or name.startswith("scripts/"):
        sub = rest[:1] if rest and re.fullmatch(r"[a-z][a-z-]+", rest[0]) else []
        assert name == "horovod-sparse" or os.access(ROOT / name, os.X_OK), name
        if name == "scripts/cluster" and sub == ["run"]:
            options = options[: options.index("--")] if "--" in options else options
            rest = rest[: rest.index("--")] if "--" in rest else rest
            options = [word for word in options if word in rest]
        text = help_of(name, *sub) if options else ""
        for option in options:
            assert option in text, f"{' '.join(words)}: no {option}"
    elif name in ("python", "python3"):
        scripts = [word for word in rest if word.endswith(".py")]
        for script in scripts:
            assert script == "train.py" or (ROOT / script).is_file(), script
    elif name in LAUNCHERS:
        inner = [i for i, word in enumerate(rest) if word in ("python", "horovod-sparse")]
        if inner:
            check(rest[inner[0] :])
    else:
        assert name in FOREIGN, f"{name}: no command that this test knows"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=lambda block: block.place)
def test_commands_exist_and_take_their_options(block: Block) -> None:
    found = commands(block)
    assert found
    for words in found:
        check(words)


def test_what_worth_it_printed_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for block, printed in itertools.pairwise(BLOCKS):
        words = commands(block)[0] if block.language == "sh" else []
        same = (printed.page, printed.language) == (block.page, "")
        if words[:2] == ["horovod-sparse", "worth-it"] and same:
            assert horovod_sparse_command(words[1:]) == 0
            assert capsys.readouterr().out.split() == printed.text.split(), printed.place
            found += 1
    assert found


@pytest.mark.parametrize("line", ["with", pytest.param("without", marks=pytest.mark.nightly)])
def test_the_readme_says_what_its_script_prints_on_two_ranks(line: str, tmp_path: Path) -> None:
    script, printed = next(pair for pair in itertools.pairwise(BLOCKS) if pair[0].what == "torchrun")
    code, expected = script.text, [printed.text] * 2
    prose = r"both end at ([\d.]+), without the line at ([\d.]+) and ([\d.]+)\."
    said = re.search(prose, (ROOT / "README.md").read_text("utf-8"))
    assert said and printed.text.startswith(f"loss {said[1]};")
    if line == "without":
        expected = [f"loss {loss}" for loss in said.groups()[1:]]
        code = re.sub(r".*# this line\n", "", code).replace("; {sync.telemetry.summary()}", "")
    (tmp_path / "train.py").write_text(code)
    torchrun = Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2
    done = ran(*torchrun, tmp_path / "train.py", PYTHONPATH=str(ROOT))
    found = sorted(done.stdout.split("loss ")[1:])  # two ranks' lines may be one
    for wanted, own in zip(map(numbers, expected), map(numbers, found), strict=True):
        assert own[: len(wanted)] == pytest.approx(wanted, rel=0.03)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]
