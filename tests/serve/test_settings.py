"""Settings come from a file, the environment and the command line, and say the same in each."""

from pathlib import Path

import pytest

from imprint.errors import ConfigurationError
from imprint.serve.settings import Settings


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nbatch = 2\nrate = 3.5\nhosts = ["a.example"]\n')
    found = Settings.load(file, {"IMPRINT_SERVE_PORT": "4", "IMPRINT_SERVE_BATCH": "5"}, port=6, batch=None)
    assert (found.port, found.batch, found.rate, found.hosts) == (6, 5, 3.5, ("a.example",))


def test_metrics_are_turned_off_by_the_same_word_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('metrics = "none"\n')
    assert Settings.load(file, {}).metrics == ""
    assert Settings.load(None, {"IMPRINT_SERVE_METRICS": "none"}).metrics == ""
    assert Settings.load(None, {}, metrics="none").metrics == ""
    assert Settings.load(None, {"IMPRINT_SERVE_METRICS": ""}).metrics == Settings().metrics


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigurationError, match="unknown setting 'prot'"):
        Settings.load(file, {})
