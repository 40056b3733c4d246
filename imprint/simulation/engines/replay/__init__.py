"""The replay engine: the recorded run itself, once per source, with that source at weight 0."""

from imprint.simulation.engines.replay.engine import Replay as Replay
