"""The command line as a person meets it: what it prints, what it refuses, how it ends, how fast it starts."""

from __future__ import annotations

import io
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tercet import cli, hints
from tercet.config.flags import key_options
from tercet.config.keys import all_keys
from tercet.config.load import load, preset_names, write_config

DOCS = Path(__file__).parents[1] / "docs"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def no_former_switches(monkeypatch):
    import os

    for name in [n for n in os.environ if n.startswith("NSA_")]:
        monkeypatch.delenv(name)


def test_an_output_that_is_not_utf_8_shows_what_it_can(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["plan", "--preset", "m7c", "--gpu", "H200"]) == 0
    out.seek(0)
    assert "32 sequences ? 2,048 tokens" in out.read()


def test_without_a_command_it_prints_an_introduction(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for text in ("tercet train --preset tiny", "tercet plan", "config diff", "--train.lr 1e-3"):
        assert text in out
    without = ", ".join(sorted(set(all_keys()) - set(key_options({}))))
    assert f"Every key but {without} is a flag" in out


def test_a_group_lists_its_commands_without_other_functions_of_the_module(capsys):
    listed = {line.split()[2] for group in cli.GROUPS for line in run(capsys, group)[1].splitlines()}
    assert {"show", "diff", "prepare", "train-tokenizer", "attention", "perplexity", "hf"} <= listed
    assert not {"describe", "describe-shards"} & listed


def test_a_plan_takes_no_time_from_the_peak_of_another_arithmetic(capsys):
    def time(*flags: str) -> tuple[str, float | None]:
        words = run(capsys, "plan", "--preset", "m7c", *flags)[1].split("\ntime ")[1]
        return words, json.loads(run(capsys, "plan", "--preset", "m7c", *flags, "--json")[1])["seconds"]

    for flags in (("--gpu", "H200"), ("--gpu", "H200", "--train.precision", "bf16"), ("--run.device", "cpu")):
        words, seconds = time(*flags)
        assert "about" in words
        assert seconds is not None
    words, seconds = time("--gpu", "H200", "--train.precision", "fp32")
    assert "not estimated: only the bf16 peak of this device is known, not fp32" in words
    assert seconds is None
    words, seconds = time("--run.device", "cpu", "--train.precision", "bf16")
    assert "only the fp32 peak of this device is known, not bf16" in words
    assert seconds is None


def test_a_plan_of_one_rank_names_the_flag_for_more(capsys):
    options = ("plan", "--preset", "tiny", "--gpu", "H100", "--parallel.strategy", "fsdp")
    hint = "planned fsdp on one rank: plan for more with --parallel.world_size N"
    assert hint in run(capsys, *options)[1]
    assert hint not in run(capsys, *options, "--parallel.world_size", "2", "--train.micro_batch", "1")[1]
    assert "rank" not in run(capsys, *options[:-2])[1]


def test_plan_as_json_is_one_line_with_the_warnings_that_the_words_end_with(capsys):
    flags = ("--preset", "tiny", "--gpu", "H200", "--data.shuffle_sequences", "100000000")
    said = [line for line in run(capsys, "plan", *flags)[1].splitlines() if line.startswith("warning")]
    found = json.loads(run(capsys, "plan", *flags, "--json")[1])
    assert found["parameters_total"] == sum(found["parameters"].values())
    assert found["memory_total"] == sum(found["memory"].values())
    assert "data.shuffle_sequences=100000000" in found["warnings"][0]
    assert said == [f"{'warning':<11} {text}" for text in found["warnings"]]
    both = ("--parallel.strategy", "ddp", "--parallel.world_size", "2", "--train.micro_batch", "2")
    assert json.loads(run(capsys, "plan", *flags, *both, "--json")[1])["seconds"] == pytest.approx(found["seconds"] / 2)


def test_control_characters_in_an_error_are_escaped(capsys):
    code, _, err = run(capsys, "config", "show", "--config", "\x1b[2Jno.toml")
    assert (code, err) == (2, "error: config file \\x1b[2Jno.toml cannot be read: No such file or directory\n")


def test_with_debug_an_error_has_its_traceback_and_the_same_exit_code(capsys):
    plain, traced = run(capsys, "plan", "--preset", "tny"), run(capsys, "plan", "--preset", "tny", "--debug")
    assert (plain[0], traced[0]) == (2, 2)
    assert "Traceback" in traced[2]
    assert "Traceback" not in plain[2]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore")]
)
def test_out_of_memory_is_one_line_without_debug(capsys, monkeypatch, error):
    def dispatch(_):
        raise error

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    code, _, err = run(capsys, "generate", "run")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: out of memory")
    assert "Traceback" in run(capsys, "generate", "run", "--debug")[2]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU here")
def test_a_plan_for_a_missing_gpu_is_an_error(capsys):
    code, out, err = run(capsys, "plan", "--preset", "m7c", "--run.device", "cuda")
    assert (code, out) == (1, "")
    assert "run.device=cuda, but this machine has no GPU: name one with --gpu" in err


def test_presets_are_listed_with_a_sentence_each(capsys):
    code, out, _ = run(capsys, "presets")
    assert code == 0
    assert "m7c-64k-dense " in out
    assert "tiny   " in out
    footer = out.split("\n\n")[1]
    local = {name for name in preset_names() if load(name).config.data.source != "fineweb-edu"}
    assert set(re.findall(r"All but (\S+) and (\S+) stream FineWeb-Edu", footer)[0]) == local


def test_config_show_prints_the_settings_of_a_run(capsys, tmp_path):
    loaded = load("tiny", flags={"train.lr": 0.5})
    write_config(loaded.config, loaded.origins, tmp_path)
    code, out, _ = run(capsys, "config", "show", str(tmp_path))
    assert (code, out) == (0, (tmp_path / "config.toml").read_text())
    assert "lr = 0.5  # flag" in out
    code, out, _ = run(capsys, "config", "show", str(tmp_path), "--changed", "--train.clip", "2")
    assert code == 0
    origins = dict(line.split(" = ")[0:1] + line.split("  # ")[1:] for line in out.splitlines())
    assert origins["train.clip"] == origins["train.lr"] == "flag"
    assert origins["train.warmup_steps"] == "preset tiny"


def test_config_show_names_what_is_not_a_run_folder(capsys, tmp_path):
    for wrong in ("nonexist", str(tmp_path)):
        code, out, err = run(capsys, "config", "show", wrong)
        assert (code, out) == (2, "")
        assert f"{wrong} is not a preset, a TOML file or a run folder" in err
    assert run(capsys, "config", "show", "tiny")[1] == run(capsys, "config", "show", "--preset", "tiny")[1]


def test_a_run_of_several_ranks_resumes_on_one(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    loaded = load("tiny", flags={"parallel.strategy": "fsdp", "parallel.world_size": 2, "train.micro_batch": 2})
    write_config(loaded.config, loaded.origins, tmp_path)
    resumed = ["--resume", "auto", "--run.dir", str(tmp_path), "--parallel.strategy", "single"]
    assert cli._load(cli.train, resumed, "tercet train")[0].config.parallel.world_size == 1


def test_config_diff_names_what_differs(capsys, tmp_path):
    code, out, _ = run(capsys, "config", "diff", "m7c", "m7c-64k")
    assert code == 0
    assert "data.seq_len: 2048 -> 65536" in out
    (tmp_path / "config.toml").write_text('preset = "m7c"\n')
    assert "are the same" in run(capsys, "config", "diff", "m7c", str(tmp_path))[1]
    assert "usage: tercet config diff A B" in run(capsys, "config", "diff", "--help")[1]


def test_former_switches_in_the_environment_are_named_once(capsys, monkeypatch):
    monkeypatch.setenv("NSA_ACCUM", "4")
    for rank, said in (("0", 1), ("1", 0)):  # as torchrun tells the processes of a machine
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert run(capsys, "presets")[2].count("warning: not read: NSA_ACCUM; docs/from-m7c.md says") == said
    page = (DOCS / "from-m7c.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| `NSA_\w+` \| (?:–|`([\w.]+)`) \|", page, re.M)
    assert len(answers) == 16
    assert {key for key in answers if key} <= set(all_keys())


def test_commands_are_refused_before_torch_is_loaded(tmp_path):
    run_folder, bare = tmp_path / "run", tmp_path / "bare"
    shutil.copytree(Path(__file__).parent / "fixtures" / "run-0.1", run_folder)
    bare.mkdir()
    for name in ("config.toml", "model.safetensors"):
        (bare / name).touch()
    commands = {
        "train --preset tiny --train.steps x": "must be a valid integer",
        "train --preset tiny --run.threads 100000": "run.threads=100000 is more than the",
        "train --preset tiny --data.source text --data.path nowhere": "nowhere matches no file",
        f"train --preset tiny --run.dir {run_folder}": "already holds a run",
        f"train --run.dir {run_folder} --resume auto --train.lr 5": "train.lr was",
        "data prepare --out o --shard_tokens x": "must be a valid integer",
        "generate nowhere --prompt a": "nowhere does not exist",
        f"generate {bare}": "no prompt given",
        f"generate {bare} --prompt a --temperature -1": "temperature=-1",
        f"generate {run_folder} --prompt {'a' * 999}": "the prompt has 999 tokens",
        f"eval ruler {run_folder} --tasks nothing": "tasks=nothing (flag): entry 1: must be 'niah_single_1'",
        f"eval selection-map {bare} out.html": "no prompt given",
        f"export hf nowhere {tmp_path / 'out'}": "nowhere does not exist",
        f"export hf {run_folder} {tmp_path / 'out'} --format llama": "cannot be exported with --format llama",
        f"import hf nowhere {tmp_path / 'out'}": "nowhere is not a folder",
    }
    script = (
        "import sys\nfrom tercet.cli import main\n"
        "assert main(['train', '--help', 'all']) == main(['generate', '--help']) == 0\n"
        "for line in sys.argv[1:]:\n"
        "    assert main(line.split()) == 2, line\n    assert 'torch' not in sys.modules, line\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *commands], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for line, said in zip(errors, commands.values(), strict=True):
        assert said in line
    assert {path.name for path in tmp_path.iterdir()} == {"run", "bare"}


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}])
@pytest.mark.parametrize("start", ["from tercet.cli import main\nmain(['doctor'])", "import tercet\nimport torch"])
def test_threads_sleep_instead_of_spinning_unless_told_otherwise(given, start):
    import os

    unset = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    script = (
        "import os, sys\n"
        "class Torch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print(os.environ.get('OMP_WAIT_POLICY'), flush=True), os._exit(0)\n"
        f"sys.meta_path.insert(0, Torch())\n{start}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=unset | given, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-1] == given.get("OMP_WAIT_POLICY", "PASSIVE")


def test_the_first_import_that_takes_seconds_is_announced(capsys, monkeypatch):
    for name in cli.AnnounceImports.SLOW:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for rank, said in (("0", "loading transformers …\n"), ("1", "")):  # one rank of a machine prints it
        monkeypatch.setenv("LOCAL_RANK", rank)
        announcer = cli.AnnounceImports()
        for name in ("json", "transformers", "torch"):
            announcer.find_spec(name)
        assert capsys.readouterr().err == said


def test_a_resumed_run_uses_its_own_configuration(capsys, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        "tercet.train.trainer.train", lambda config, *, origins, resume: seen.append((config, origins, resume)) or 0
    )
    monkeypatch.setattr("tercet.train.resume.check_start", lambda config, resume: None)  # it is no real checkpoint
    checkpoint = tmp_path / "a" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    kept = load(preset="tiny", flags={"train.lr": 0.125})
    write_config(kept.config, kept.origins, tmp_path / "a")
    a, new = str(tmp_path / "a"), str(tmp_path / "new")
    ways = [("auto", a), (a, None), (str(checkpoint), None), (str(checkpoint.parent), a), (str(checkpoint), new)]
    for resume, folder in ways:
        where = ["--run.dir", folder] if folder else []
        code, _, err = run(capsys, "train", "--resume", resume, *where, "--train.steps", "7")
        assert (code, err) == (0, "")
        config, origins, taken = seen.pop()
        assert (config.train.lr, config.train.steps, config.model, taken) == (0.125, 7, kept.config.model, resume)
        assert origins | {"run.dir": "default"} == kept.origins | {"train.steps": "flag"}
    # What was said outright counts, and where nothing was kept, something must be.
    run(capsys, "train", "--preset", "m7c", "--resume", "auto", "--run.dir", a)
    assert seen.pop()[0].run.name == "m7c"
    code, _, err = run(capsys, "train", "--resume", "auto", "--run.dir", new)
    assert code == 2
    assert f"there is no run to resume at {new}" in err
    assert not seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--resume auto --run.dir gone", "--resume auto: there is no run to resume at gone, which does not exist: "),
        ("--resume auto --run.dir gone", "train --preset tiny --run.dir gone`"),
        ("--resume gone", "--resume gone: there is no run to resume at gone, which does not exist: "),
        ("--resume auto --run.dir bare", "there is no run to resume at bare, which has no config.toml: "),
        ("--resume auto", "--resume auto needs --run.dir, a preset or a file: "),
        ("--run.dir gone", "no configuration given: try `"),
        ("--run.dir old", "old already holds a run: resume it with "),
    ],
)
def test_resuming_a_missing_run_names_it_and_suggests_how_to_start_one(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("bare").mkdir()
    Path("old").mkdir()
    Path("old", "config.toml").touch()
    code, out, err = run(capsys, "train", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert {p.name for p in tmp_path.iterdir()} == {"bare", "old"}


def test_python_dash_m_is_the_same_command_and_the_first_line_comes_within_a_second():
    # Processor time, and the best of three: other tests may be running beside this one.
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "tercet", "presets"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 1.0, taken
    assert "tiny" in done.stdout
    failed = subprocess.run([sys.executable, "-m", "tercet", "trian"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (2, "")


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m tercet config show --preset m7c | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_suggested_commands_can_be_pasted_whatever_the_folder_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a text.txt").write_text("some words of text, and some more of these words\n" * 20)
    source = ("--data.source", "text", "--data.path", "a text.txt")
    made = run(capsys, "data", "train-tokenizer", *source, "--vocab_size", "260", "--out", "my tokens.json")[1]
    assert made.endswith("use it with: --data.tokenizer 'my tokens.json'\n")
    made = run(capsys, "data", "prepare", *source, "--out", "my shards")[1]
    assert "--data.source shards --data.path 'my shards' --data.tokenizer byte\n" in made
    assert "tercet report 'my run'" in hints.report("my run")


def documented_commands() -> list[str]:
    """Lines of these pages that are commands; training is planned instead, which takes the same."""
    found = []
    for page in ("configuration.md", "from-m7c.md", "data.md"):
        for line in (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            command = line.partition("#")[0].strip()
            if re.match(r"(torchrun .* -m )?tercet (train|plan|config|presets)\b", command):
                command = re.sub(r"^torchrun .* -m ", "", command).replace("tercet train", "tercet plan")
                found.append(command.removeprefix("tercet ").replace("runs/m7c-20261115-093000", "run"))
    return found


@pytest.mark.parametrize("command", documented_commands() or ["none found"])
def test_documented_commands_work(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[train]\nclip = 0.5\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('preset = "m7c"\n')
    assert run(capsys, *shlex.split(command))[0] == 0


def test_a_current_folder_that_was_deleted_is_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["presets"]) == 2
    assert capsys.readouterr().err == "error: the current folder was deleted: change to another one\n"
