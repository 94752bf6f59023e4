"""The README says what is so: its table comes from the result files, its examples run."""

import inspect
import json
import re
import shlex
from pathlib import Path

import torch
import typer.main

import holdfast as hf
from holdfast.cli import app
from holdfast.experiments import assess, find_experiment, load_results
from holdfast.results import RunResult, save
from make_numbers import filled
from tables import results

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_its_numbers_and_tables_are_those_of_the_files():
    assert filled(README) == README, "run `make numbers`"


def test_its_command_shows_a_column_of_its_table_and_trains_nothing():
    (command,) = re.findall("`(holdfast reproduce .* --results results)`", README)
    assert command == "holdfast reproduce table1 --only benchmark=rot-mnist --seeds 10 --results results"
    column = find_experiment("table1").select(["benchmark=rot-mnist"])
    table = assess(column, load_results(ROOT / "results"), range(10))
    shown = README.partition("<!-- results:begin -->")[2].partition("### The field")[0]
    for verdict in table.verdicts:
        assert f"| {verdict.mean:.2f} ± {verdict.std:.2f} (10) " in shown, verdict.cell


def test_it_tells_speeds():
    told = README.partition("<!-- speed:begin -->")[2].partition("<!-- speed:end -->")[0]
    assert "steps per second" in " ".join(told.split())


def test_what_it_says_of_a_run_that_fell_to_chance_is_so():
    files = (ROOT / "results" / "rot-mnist").glob("dino-500-seed?.json")
    worst, *others = sorted(json.loads(path.read_text("utf-8"))["accuracy"] for path in files)
    assert (len(others), round(worst)) == (9, 10)
    assert f"The other nine reach {others[0]:.0f} to {others[-1]:.0f}." in " ".join(README.split())


def test_it_says_where_to_find_what():
    """From the README alone: each place it names has the method it names, and a step is one page."""
    from holdfast import training
    from holdfast.buffer import reservoir

    found = {
        "learners/consistency.py": hf.ConsistencyReplay.compute_losses,
        "learners/base.py": hf.Learner.observe,
        "learners/clser.py": hf.LEARNERS["clser"].commit,
        "training.py": training._train,
        "buffer/reservoir.py": reservoir.place,
    }
    for file, function in found.items():
        assert re.search(rf"`{function.__name__}` .*\[`{file}`\]\(src/holdfast/{file}\)", README), file
        assert inspect.getsourcefile(inspect.unwrap(function)).endswith(f"holdfast/{file}")
    step = (hf.Learner.observe, hf.Learner.losses, hf.Learner.descend, hf.Learner.backward, hf.Learner.commit)
    step += (hf.ConsistencyReplay.compute_losses, inspect.unwrap(hf.ConsistencyReplay.objective))
    assert sum(len(inspect.getsource(part).splitlines()) for part in step) < 110


def test_the_field_is_shown_as_far_as_there_are_results(tmp_path):
    for number, (method, benchmark) in enumerate(
        (("er", "rot-mnist"), ("mse", "seq-cifar10"), ("clser", "rot-mnist"), ("lwf", "rot-mnist"))
    ):
        for seed in range(3):
            config = hf.RunConfig.preset(benchmark, method, buffer_size=200, seed=seed)
            matrix = torch.full((2, 2), 90.0 + number + seed, dtype=torch.float64)
            save(RunResult(config, matrix, matrix, matrix[0], 10.0), tmp_path)
        made = results(tmp_path)
        assert ("### The field" in made) == (method in ("clser", "lwf"))
    shown = made.partition("### The field")[2]
    table = [line for line in shown.splitlines() if line.startswith(("|", "**"))]
    assert table == [
        "**no buffer**",
        "|  | rot-mnist |",
        "|---|---:|",
        "| lwf | 94.00 ± 1.00 (3) |",
        "**buffer 200**",
        "|  | seq-cifar10 | published | rot-mnist | published |",
        "|---|---:|---:|---:|---:|",
        "| er | – | 44.79 ± 1.86 | 91.00 ± 1.00 (3) ✗ | 85.01 ± 1.90 |",
        "| mse | 92.00 ± 1.00 (3) ✗ | 64.88 ± 1.17 | – | 90.43 ± 1.87 |",
        "| clser | – | 66.19 ± 0.75 | 93.00 ± 1.00 (3) ? | 92.26 |",
    ]
    assert "Other papers ran other code" in shown


def test_the_first_example_runs():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    model = torch.nn.Linear(4, 3)
    scope = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "stream": [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(3)],
    }
    exec(code, scope)
    assert isinstance(scope["losses"], hf.Losses)
    assert scope["learner"].buffer.stored == 24


def test_every_command_and_option_it_shows_exists():
    commands = typer.main.get_command(app).commands
    shown = re.findall(r"^(holdfast [^#\n]*)", README, re.MULTILINE)
    assert shown
    for line in shown:
        _, name, *rest = shlex.split(line.strip())
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, line


def test_every_link_to_a_file_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_every_script_of_benchmarks_is_listed_there():
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text("utf-8")
    listed = re.findall(r"`(\w+\.(?:py|toml))`", page)
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".toml"))
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (folder / target).exists(), target
