"""`imprint bench` and `imprint sweep`: our scores and the field's against the same truth, and how settings matter."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from imprint.benchmarking.bench import Bench, Method
from imprint.benchmarking.methods import imprints, paths
from imprint.benchmarking.settings.catalogue import SETTINGS, protocol
from imprint.benchmarking.sweep import called, draw
from imprint.benchmarking.sweep import sweep as swept
from imprint.cli.commands.options import AsJson
from imprint.cli.terminal import console, errors, marked, working
from imprint.errors import ConfigurationError
from imprint.runtime.threads import set_threads
from imprint.store.files import write

SettingName = Annotated[str, typer.Argument(metavar="SETTING", help=f"One of {', '.join(SETTINGS)}.")]
OutPath = Annotated[Path, typer.Option("--out", "-o", help="Folder for truths, models, scores and results.")]
Device = Annotated[str, typer.Option(help="Such as `cuda`.")]
LeaveOneOut = Annotated[bool, typer.Option("--loo", help="Leave-one-out too: a model for every training example.")]


def bench(
    setting: SettingName,
    out: OutPath,
    peers: Annotated[bool, typer.Option("--peers", help="Run the methods of dattri beside ours.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="From how many training runs each method starts.")] = 3,
    ten: Annotated[bool, typer.Option("--ten", help="Our scores from ten runs together, too.")] = False,
    path: Annotated[bool, typer.Option("--path", help="The path of training too, with the halves as sources.")] = False,
    loo: LeaveOneOut = False,
    device: Device = "cpu",
    json: AsJson = False,
) -> None:
    """Attribute to every training example of a setting, by our method and others, and compare with retraining.

    Makes the truth (random halves, with seeds that nothing was tuned on), trains the runs, scores, and writes a table,
    a picture and results.json into the folder. Goes on where it stood if it is interrupted.

    For example: `imprint bench mnist-mlp --peers --ten --path --loo --device cuda --out bench/mnist-mlp`
    """
    with working():
        made = Bench(protocol(setting, device), out)
        set_threads(made.protocol.task().model)
        methods: dict[str, Method] = {"Imprint": imprints()}
        if ten:
            methods["Imprint, ten runs"] = imprints(runs=10)
        if path:
            if made.protocol.path is None:
                raise ConfigurationError(f"no path is settled for {setting}: leave out --path.")
            methods["Imprint, path"] = paths(made.protocol.path, 0)
        if peers:
            from imprint.benchmarking.peers import peers as others

            methods |= others(made)
        with made.alone():
            found = made.compared(methods, range(runs), loo)
    text = found.markdown()
    write(out / "results.json", lambda path: path.write_text(dumps(found.to_json(), indent=1)))
    write(out / "results.md", lambda path: path.write_text(text + "\n"))
    found.plot(out / "results.png")
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(Markdown(text))
        errors.print(f"Kept in {marked(out)}: results.md, results.png, results.json.", soft_wrap=True)


def sweep(
    setting: SettingName,
    out: OutPath,
    checkpoint: Annotated[int, typer.Option(min=0, help="Which checkpoint of the run, by number.")] = 0,
    directions: Annotated[int, typer.Option(min=1, help="Of the curvature that are told apart.")] = 300,
    loo: LeaveOneOut = False,
    device: Device = "cpu",
    json: AsJson = False,
) -> None:
    """How do T, η and λ matter in a setting? LDS from steps that are too slow to steps that diverge, and over λ.

    In the folder of a benchmark its truths and runs are used again. Goes on where it stood if it is interrupted.

    For example: `imprint sweep mnist-mlp --checkpoint 2 --device cuda --out bench/mnist-mlp`
    """
    with working():
        made = Bench(protocol(setting, device), out)
        set_threads(made.protocol.task().model)
        last = len(made.protocol.epochs) - 1
        if checkpoint > last:
            raise ConfigurationError(f"{setting} has checkpoints 0 to {last}, not {checkpoint}.")
        with made.alone():
            points = swept(made, checkpoint, directions=directions, leave_one_out=loo)
        picture = out / f"{called(checkpoint, directions, loo)}.png"
        draw(points, picture, f"{setting}, checkpoint {checkpoint}")
    if json:
        typer.echo(dumps([vars(point) for point in points]))
        return
    best = max(points, key=lambda point: point.lds)
    shown = f"λ = {best.damping:.2g} μ at T = ∞" if best.steps is None else f"T = {best.steps}, η = {best.relative:g}/μ"
    console.print(f"The best of {len(points)} settings: LDS {best.lds:.3f} with {shown}. Picture: {marked(picture)}")
