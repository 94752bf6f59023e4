"""holdfast export: the final model of a run as one file, for use elsewhere."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from holdfast import results
from holdfast.analysis.runs import final_model, rerun_command
from holdfast.benchmarks import Benchmark
from holdfast.cli.app import DataRoot, Json, Plugins, app, import_plugins
from holdfast.data import data_root
from holdfast.display import data_progress, output, table
from holdfast.errors import HoldfastError, UsageError
from holdfast.export import FORMATS, export, format_of
from holdfast.results import RunResult
from holdfast.rng import generator

SHOWN = 8  # file and model are compared on so many test images, and on as many random ones


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A result folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. Default: named after the run.", metavar="FILE")
    ] = None,
    format: Annotated[str | None, typer.Option(help="torch or onnx. Default: as the file's name ends.")] = None,
    normalization: Annotated[
        bool,
        typer.Option(
            "--with-normalization/--without-normalization",
            help="With: the model takes bytes 0..255. Without: floats as the network sees them.",
        ),
    ] = True,
    data: DataRoot = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write the final model of a run as one file.

    The formats are those of torch.export and ONNX. The model takes images (batch, channels, height, width) in batches
    of any size and returns logits (batch, classes). Before the file gets its name, it is read back and its answers are
    compared with those of the model.
    """
    import_plugins(plugin)
    result, weights = _read(run)
    config = result.config
    ending = FORMATS[format_of(Path(), format or "torch")]
    path = out or Path(f"{config.benchmark}-{config.method}-{config.fingerprint}{ending}")
    kind = format_of(path, format)
    with data_progress():
        model, benchmark = final_model(run, config, weights, data_root(data))
    images = _examples(benchmark, config.seed)
    about = {"fingerprint": config.fingerprint, "config": config.to_dict(), "environment": result.environment}
    about["accuracy"] = result.to_json()["accuracy"]
    view = benchmark.normalize if normalization else None
    made = export(model, images if view else benchmark.normalize(images), path, format=kind, view=view, about=about)
    report = {
        "file": str(made.path),
        "format": made.format,
        "input": f"{'uint8' if view else 'float32'} (batch, {', '.join(map(str, images.shape[1:]))})",
        "output": f"float32 (batch, {benchmark.classes})",
        "bytes": made.size,
        "difference": made.difference,
        "fingerprint": config.fingerprint,
    }
    if as_json:
        print(json.dumps(report))
        return
    checked = f"{made.difference:.2g}" if made.difference is not None else "not compared: onnxruntime is not installed"
    rows = [*list(report.items())[:5], ("largest difference", checked)]
    output.print(table(config.title, ("", ""), rows))


def _read(run: Path) -> tuple[RunResult, dict[str, Tensor]]:
    """The result in the folder `run` and its weights; raises if there are none."""
    if run.is_file():
        raise UsageError(f"{run} is a file; give the folder that a run was saved to, for instance {run.parent}.")
    inside = [] if (run / results.RESULT).exists() else [file.parent for file in run.glob(f"[!.]*/{results.RESULT}")]
    if inside:
        raise UsageError(f"{run} is a folder of results ({len(inside)}): give one of them, for instance {min(inside)}.")
    result, weights = results.read(run), results.read_tensors(run, results.WEIGHTS)
    if not weights:
        again = rerun_command(result.config, run)
        raise HoldfastError(f"{run} has no weights, so there is no model to export. To get them: {again}")
    return result, weights


def _examples(benchmark: Benchmark, seed: int) -> Tensor:
    """Images on which file and model are compared: some of the first test set, and as many random ones."""
    shown = benchmark.tasks[0].test.images[:SHOWN].cpu()
    noise = torch.randint(0, 256, shown.shape, dtype=torch.uint8, generator=generator(seed, "export"))
    return torch.cat([shown, noise])
