"""Merkle trees as RFC 6962 defines them: roots, and proofs that a leaf is in a tree or that a tree only grew.

With leaves d_i and SHA-256 H, the root of one leaf is H(0x00 ‖ d), and that of n > 1 leaves is H(0x01 ‖ L ‖ R), where L
is the root of the first k leaves, R that of the rest, and k is the largest power of two below n. The first byte tells
leaves from inner nodes, so that nobody can pass one off as the other.

A node at (level, index) is the root of the 2^level leaves from index·2^level on, and never changes once those leaves
are there. Proofs are made of such nodes; `imprint.credit.log` keeps some of them and derives the others.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256().digest()

Node = Callable[[int, int], bytes]
"""Returns the node at a level and an index."""


def hash_leaf(content: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\x00" + content).digest()


def hash_pair(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def fold(nodes: Sequence[bytes]) -> bytes:
    """Return the root over 2^k nodes of one level."""
    while len(nodes) > 1:
        nodes = [hash_pair(nodes[i], nodes[i + 1]) for i in range(0, len(nodes), 2)]
    return nodes[0]


@dataclass(frozen=True)
class Frontier:
    """A tree of some size, as far as it takes to append: the roots of its largest complete subtrees, left to right.

    There is one for each bit of the size, the largest first.
    """

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.peaks) != self.size.bit_count():
            raise ValueError(f"a tree of {self.size} leaves has {self.size.bit_count()} peaks, got {len(self.peaks)}")

    def extend(self, leaves: Iterable[bytes]) -> tuple["Frontier", list[tuple[int, int, bytes]]]:
        """Append hashed leaves; return the larger tree, and the inner nodes this completes: (level, index, hash)."""
        size, peaks, completed = self.size, list(self.peaks), list[tuple[int, int, bytes]]()
        for leaf in leaves:
            node, level = leaf, 0
            while size >> level & 1:
                node, level = hash_pair(peaks.pop(), node), level + 1
                completed.append((level, size >> level, node))
            peaks.append(node)
            size += 1
        return Frontier(size, tuple(peaks)), completed

    @property
    def root(self) -> bytes:
        """The root of the whole tree."""
        if not self.peaks:
            return EMPTY_ROOT
        root = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            root = hash_pair(peak, root)
        return root

    def find_difference(self, other: "Frontier") -> tuple[int, int]:
        """Return the first and the last leaf of the subtrees in which another tree of the same size differs."""
        levels = [level for level in reversed(range(self.size.bit_length())) if self.size >> level & 1]
        ends = list(accumulate((1 << level for level in levels), initial=0))
        differ = [place for place, pair in enumerate(zip(self.peaks, other.peaks, strict=True)) if pair[0] != pair[1]]
        return ends[differ[0]], ends[differ[-1] + 1] - 1


def hash_tree(leaves: Iterable[bytes]) -> bytes:
    """Return the root of a tree of hashed leaves."""
    return Frontier().extend(leaves)[0].root


def nodes_of(leaves: Sequence[bytes]) -> Node:
    """Return the nodes of a tree whose hashed leaves are at hand; each is hashed once."""
    known: dict[tuple[int, int], bytes] = {}

    def node(level: int, index: int) -> bytes:
        if level == 0:
            return leaves[index]
        if (level, index) not in known:
            known[level, index] = hash_pair(node(level - 1, 2 * index), node(level - 1, 2 * index + 1))
        return known[level, index]

    return node


def find_root(size: int, node: Node) -> bytes:
    """Return the root over the first `size` leaves of a tree, from its nodes."""
    return _root_between(0, size, node) if size else EMPTY_ROOT


def prove_inclusion(index: int, size: int, node: Node) -> list[bytes]:
    """Return the audit path of a leaf in the tree of the first `size` leaves: RFC 6962, section 2.1.1."""
    _require(0 <= index < size, f"there is no leaf {index} in a tree of {size}")
    path, start, stop = list[bytes](), 0, size
    while stop - start > 1:
        middle = start + _largest_power_below(stop - start)
        if index < middle:
            path.append(_root_between(middle, stop, node))
            stop = middle
        else:
            path.append(_root_between(start, middle, node))
            start = middle
    return path[::-1]


def prove_consistency(old: int, new: int, node: Node) -> list[bytes]:
    """Return the proof that the tree of `new` leaves begins with that of `old`: RFC 6962, section 2.1.2."""
    _require(0 < old <= new, f"a tree of {new} leaves cannot have grown from {old}")
    path, start, stop, whole = list[bytes](), 0, new, True
    while old != stop:
        middle = start + _largest_power_below(stop - start)
        if old <= middle:
            path.append(_root_between(middle, stop, node))
            stop = middle
        else:
            path.append(_root_between(start, middle, node))
            start, whole = middle, False
    if not whole:
        path.append(_root_between(start, stop, node))
    return path[::-1]


def follow_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """Return the root that an audit path leads to from a hashed leaf; None if it cannot be a path of that leaf."""
    if not 0 <= index < size:
        return None
    place, last, root = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            return None
        if place & 1 or place == last:
            root = hash_pair(sibling, root)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            root = hash_pair(root, sibling)
        place, last = place >> 1, last >> 1
    return root if last == 0 else None


def check_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Tell whether a proof shows that a hashed leaf has this place in the tree with this root."""
    return follow_inclusion(leaf, index, size, path) == root


def check_consistency(old: int, new: int, old_root: bytes, new_root: bytes, path: Sequence[bytes]) -> bool:
    """Tell whether a proof shows that the tree with the new root begins with the leaves of the old one."""
    if old == 0:
        return not path and old_root == EMPTY_ROOT
    if old == new:
        return not path and old_root == new_root
    if not 0 < old < new:
        return False
    steps = list(path)
    place, last = old - 1, new - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    if not place:  # the old tree is complete, and so a node of the new one
        steps.insert(0, old_root)
    if not steps:
        return False
    first = second = steps[0]
    for sibling in steps[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            first, second = hash_pair(sibling, first), hash_pair(sibling, second)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            second = hash_pair(second, sibling)
        place, last = place >> 1, last >> 1
    return last == 0 and first == old_root and second == new_root


def _root_between(start: int, stop: int, node: Node) -> bytes:
    """Return the root over the leaves from `start` up to `stop`; `start` is a multiple of a power of two above both."""
    count = stop - start
    level = count.bit_length() - 1
    if count == 1 << level:
        return node(level, start >> level)
    middle = start + _largest_power_below(count)
    return hash_pair(_root_between(start, middle, node), _root_between(middle, stop, node))


def _largest_power_below(count: int) -> int:
    return 1 << (count - 1).bit_length() - 1


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
