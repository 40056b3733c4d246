"""Merkle trees against the definitions of RFC 6962 written out, and against the RFC's own examples."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imprint.credit.merkle import (
    EMPTY_ROOT,
    Frontier,
    check_consistency,
    check_inclusion,
    find_root,
    hash_leaf,
    hash_pair,
    hash_tree,
    nodes_of,
    prove_consistency,
    prove_inclusion,
)

LEAVES = [hash_leaf(bytes([value])) for value in range(70)]


def defined_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, word for word, on hashed leaves."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hash_pair(defined_root(leaves[:k]), defined_root(leaves[k:]))


def defined_path(m: int, leaves: list[bytes]) -> list[bytes]:
    """PATH of section 2.1.1."""
    if len(leaves) == 1:
        return []
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if m < k:
        return [*defined_path(m, leaves[:k]), defined_root(leaves[k:])]
    return [*defined_path(m - k, leaves[k:]), defined_root(leaves[:k])]


def defined_proof(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    """SUBPROOF of section 2.1.2."""
    if m == len(leaves):
        return [] if whole else [defined_root(leaves)]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if m <= k:
        return [*defined_proof(m, leaves[:k], whole), defined_root(leaves[k:])]
    return [*defined_proof(m - k, leaves[k:], False), defined_root(leaves[:k])]


def test_roots_are_those_of_certificate_transparency() -> None:
    """The leaves and roots that implementations of certificate transparency are tested with."""
    texts = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [hash_leaf(bytes.fromhex(text)) for text in texts]
    assert hash_tree([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert hash_tree(leaves[:1]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert hash_tree(leaves[:3]).hex() == "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"
    assert hash_tree(leaves).hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


@pytest.mark.parametrize("size", range(1, 34))
def test_roots_and_proofs_are_as_the_definition_has_them(size: int) -> None:
    leaves = LEAVES[:size]
    node, root = nodes_of(LEAVES), defined_root(leaves)
    assert hash_tree(leaves) == find_root(size, node) == root
    for index in range(size):
        path = prove_inclusion(index, size, node)
        assert path == defined_path(index, leaves)
        assert check_inclusion(leaves[index], index, size, path, root)
    for old in range(1, size + 1):
        proof = prove_consistency(old, size, node)
        assert proof == defined_proof(old, leaves)
        assert check_consistency(old, size, defined_root(leaves[:old]), root, proof)


def test_an_empty_tree_has_the_hash_of_nothing_and_grows_into_any() -> None:
    assert hash_tree([]) == find_root(0, nodes_of([])) == EMPTY_ROOT
    assert check_consistency(0, 5, EMPTY_ROOT, defined_root(LEAVES[:5]), [])
    assert not check_consistency(0, 5, LEAVES[0], defined_root(LEAVES[:5]), [])


@given(st.integers(1, 70), st.data())
def test_a_changed_proof_proves_nothing(size: int, data: st.DataObject) -> None:
    node, root = nodes_of(LEAVES), find_root(size, nodes_of(LEAVES))
    index = data.draw(st.integers(0, size - 1))
    path = prove_inclusion(index, size, node)
    other = data.draw(st.integers(0, size - 1).filter(lambda each: each != index)) if size > 1 else index + 1
    assert not check_inclusion(LEAVES[index], other, size, path, root)
    assert not check_inclusion(hash_leaf(b"forged"), index, size, path, root)
    assert not check_inclusion(LEAVES[index], index, size, [*path, EMPTY_ROOT], root)
    if path:
        place = data.draw(st.integers(0, len(path) - 1))
        changed = [*path[:place], hash_leaf(path[place]), *path[place + 1 :]]
        assert not check_inclusion(LEAVES[index], index, size, changed, root)
        assert not check_inclusion(LEAVES[index], index, size, path[:-1], root)


@given(st.integers(1, 69), st.data())
def test_a_rewritten_past_has_no_consistency_proof(old: int, data: st.DataObject) -> None:
    new = data.draw(st.integers(old + 1, 70))
    proof = prove_consistency(old, new, nodes_of(LEAVES))
    old_root, new_root = (find_root(size, nodes_of(LEAVES)) for size in (old, new))
    place = data.draw(st.integers(0, old - 1))
    rewritten = [*LEAVES[:place], hash_leaf(b"forged"), *LEAVES[place + 1 :]]
    forged_root, forged = find_root(new, nodes_of(rewritten)), prove_consistency(old, new, nodes_of(rewritten))
    assert check_consistency(old, new, old_root, new_root, proof)
    assert not check_consistency(old, new, old_root, forged_root, forged)
    assert not check_consistency(old, new, old_root, forged_root, proof)
    assert not check_consistency(old, new, old_root, new_root, proof[:-1])
    assert not check_consistency(old, new, old_root, new_root, [*proof, EMPTY_ROOT])
    assert not check_consistency(new, old, new_root, old_root, proof)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_tree_may_grow_in_any_steps(steps: list[int]) -> None:
    frontier, known, at = Frontier(), dict[tuple[int, int], bytes](), 0
    for step in steps:
        frontier, completed = frontier.extend(LEAVES[at : at + step])
        known |= {(level, index): node for level, index, node in completed}
        at = min(at + step, len(LEAVES))
    assert frontier.size == at and frontier.root == defined_root(LEAVES[:at])
    node = nodes_of(LEAVES)
    expected = {(level, index) for level in range(1, 8) for index in range(at >> level)}
    assert set(known) == expected and all(node(*place) == found for place, found in known.items())


def test_a_frontier_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a tree of 3 leaves has 2 peaks, got 1"):
        Frontier(3, (EMPTY_ROOT,))
