"""Templates of pages, whose values are text that contains no markup."""

from typing import TYPE_CHECKING

from imprint.display import for_terminal
from imprint.errors import MissingExtra

if TYPE_CHECKING:
    from jinja2 import Environment


def make_environment(package: str, feature: str, extra: str, folder: str = "") -> "Environment":
    """Return an environment for the templates of a package.

    feature, extra: what needs jinja2, and the extra that brings it, for the error where it is missing.
    folder: where the package keeps them; by default beside its modules.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra(feature, extra) from error
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: for_terminal(value) if type(value) is str else value,
    )
