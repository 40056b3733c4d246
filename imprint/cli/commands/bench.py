"""Implements `imprint bench` and `imprint sweep`: compare methods, and settings, against the same ground truth."""

from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from imprint.attribution.labels import MEANINGS
from imprint.benchmarking.bench import Bench, Method
from imprint.benchmarking.methods import custom, imprints, paths
from imprint.benchmarking.settings.catalogue import SETTINGS, load_protocol
from imprint.benchmarking.sweep import name_sweep, plot_sweep
from imprint.benchmarking.sweep import sweep as run_sweep
from imprint.cli.commands.options import AsJson
from imprint.cli.loading import load_function
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints
from imprint.errors import ConfigurationError
from imprint.runtime.threads import set_threads
from imprint.store.files import write

SettingName = Annotated[str, typer.Argument(metavar="SETTING", help=f"A built-in setting: {', '.join(SETTINGS)}.")]
OutPath = Annotated[Path, typer.Option("--out", "-o", help="The folder for ground truth, models, scores and results.")]
Device = Annotated[str, typer.Option(help="The device to use, such as `cuda`.")]
LeaveOneOut = Annotated[
    bool,
    typer.Option("--loo", help="Also compare with leave-one-out retraining: one model for every training example."),
]


def bench(
    setting: SettingName,
    out: OutPath,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Also run the methods of dattri, and of kronfluence if it is installed, at the trained model; and "
            "most of them at early checkpoints too.",
        ),
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="How many training runs each method is scored on.")] = 3,
    ten: Annotated[bool, typer.Option("--ten", help="Also score Imprint on ten runs together.")] = False,
    path: Annotated[
        bool, typer.Option("--path", help="Also simulate along the path of training, with the halves as sources.")
    ] = False,
    loo: LeaveOneOut = False,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="FILE.py:NAME",
            help="Also score with a function of your own, `scores(task, data, queries, checkpoints)`, which returns a "
            "tensor (queries, examples): positive where the example raises the query's margin. Repeat the option for "
            "several.",
        ),
    ] = None,
    device: Device = "cpu",
    json: AsJson = False,
) -> None:
    """Score every training example of a setting with Imprint and other methods, and compare with retraining.

    Retrains on random halves, with seeds that nothing was tuned on, trains the runs, scores them, and writes
    results.md, results.png and results.json to the folder. An interrupted benchmark resumes when you run the same
    command again.

    For example:

    - `imprint bench mnist-mlp --peers --ten --path --loo --device cuda --out bench/mnist-mlp`

    - `imprint bench digits --method my_method.py:scores --out bench/digits`
    """
    with redirect_prints():
        benchmark = Bench(load_protocol(setting, device), out)
        set_threads(benchmark.protocol.build_task().model)
        methods: dict[str, Method] = {"Imprint": imprints()}
        if ten:
            methods["Imprint, ten runs"] = imprints(runs=10)
        if path:
            if benchmark.protocol.path is None:
                raise ConfigurationError(f"{setting} has no plan for a path: omit --path.")
            methods["Imprint, path"] = paths(benchmark.protocol.path, 0)
        if peers:
            methods |= _find_peers(benchmark)
        methods |= {name: custom(name, *load_function(name)) for name in method or ()}
        with benchmark.alone():
            found = benchmark.compare(methods, range(runs), loo)
    text = found.to_markdown()
    write(out / "results.json", lambda path: path.write_text(dumps(found.to_json(), indent=1)))
    write(out / "results.md", lambda path: path.write_text(text + "\n"))
    found.plot(out / "results.png")
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(Markdown(text))
        errors.print(f"Written to {escape_markup(out)}: results.md, results.png, results.json.", soft_wrap=True)


def _find_peers(benchmark: Bench) -> dict[str, Method]:
    """Return the methods of other packages at the trained model and at early checkpoints."""
    from imprint.benchmarking.early import early_peers
    from imprint.benchmarking.peers import peers

    methods = peers(benchmark) | early_peers(benchmark)
    if not find_spec("kronfluence"):
        errors.print(
            "kronfluence is not installed, so its EK-FAC is left out: docs/command-line.md says how to install it.",
            soft_wrap=True,
        )
        return methods
    from imprint.benchmarking.kronfluence import kronfluence_peers

    return methods | kronfluence_peers(benchmark)


def sweep(
    setting: SettingName,
    out: OutPath,
    checkpoint: Annotated[int, typer.Option(min=0, help="The number of the checkpoint.")] = 0,
    directions: Annotated[int, typer.Option(min=1, help="How many curvature directions are resolved.")] = 300,
    loo: LeaveOneOut = False,
    device: Device = "cpu",
    json: AsJson = False,
) -> None:
    """Show how steps, learning rate and damping change the faithfulness of scores.

    Computes the LDS for few to many steps, with learning rates from too slow to diverging, and for a range of damping.
    Writes a figure and a JSON file to the folder; in the folder of `imprint bench`, its ground truth and runs are
    reused. An interrupted sweep resumes when you run the same command again.

    For example: `imprint sweep mnist-mlp --checkpoint 2 --device cuda --out bench/mnist-mlp`
    """
    with redirect_prints():
        benchmark = Bench(load_protocol(setting, device), out)
        set_threads(benchmark.protocol.build_task().model)
        last = len(benchmark.protocol.epochs) - 1
        if checkpoint > last:
            raise ConfigurationError(f"{setting} has checkpoints 0 to {last}, not {checkpoint}.")
        with benchmark.alone():
            results = run_sweep(benchmark, checkpoint, directions=directions, leave_one_out=loo)
        picture = out / f"{name_sweep(checkpoint, directions, loo)}.png"
        plot_sweep(results, picture, f"{setting}, checkpoint {checkpoint}, {results[0].question}")
    if json:
        typer.echo(dumps([vars(result) for result in results]))
        return
    best = max(results, key=lambda result: result.lds)
    chosen = (
        f"infinite steps, damping {best.damping:.2g} μ"
        if best.steps is None
        else f"{best.steps} steps, lr {best.relative:g}/μ"
    )
    console.print(
        f"The best of {len(results)} settings has an LDS of {best.lds:.3f}: {chosen}, where μ is the largest "
        f"curvature. The ground truth answers {MEANINGS[best.question]}. Figure: {escape_markup(picture)}"
    )
