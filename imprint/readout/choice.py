"""Says which readouts are right for a store."""

from imprint.errors import ReadoutError
from imprint.readout.kernels import UNLIKE_DERIVATIVES, ReadoutName
from imprint.store.reading import Store


def list_readouts(store: Store) -> list[ReadoutName]:
    """List the readouts that are right for a store; the first is the default."""
    if store.removes:
        return ["removed"]
    return ["jvp", "central", *(["literal"] if store.manifest.plan.holds_pair else []), "gradient"]  # type: ignore[list-item]


def refuse_readout(store: Store, readout: ReadoutName) -> None:
    """Refuse a readout that a store does not hold the imprints for."""
    if readout in list_readouts(store):
        return
    if store.removes:
        raise ReadoutError(
            f"the imprints of this store are removals that were really made, and {UNLIKE_DERIVATIVES}: it is read out "
            f'by "removed", not by "{readout}".'
        )
    if readout == "removed":
        raise ReadoutError(
            'the readout "removed" is for stores of a repeated run, whose imprints are removals that were really made; '
            'the imprints of this one are derivatives: read it out by "jvp".'
        )
    raise ReadoutError(
        "a literal readout needs both perturbed end points of each source, and this store was made without "
        'them: simulate with keep_pair=True, or read out by "jvp".'
    )
