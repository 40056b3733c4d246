"""Keys are made once, readable to their owner alone, and refused where they are none."""

import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from imprint.errors import ConfigurationError
from imprint.keys import (
    PASSPHRASE,
    identify_key,
    is_signed,
    load_private_key,
    load_public_key,
    load_public_keys,
    make_keys,
)


def test_a_signature_is_known_by_the_public_key(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path / "key")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600 and public.name == "key.pub"
    key, known = load_private_key(private), load_public_key(public)
    signature = key.sign(b"text")
    assert is_signed(known, signature, b"text")
    assert not is_signed(known, signature, b"other") and not is_signed(known, b"x" * 64, b"text")
    assert identify_key(known) == identify_key(key.public_key()) and len(identify_key(known)) == 32


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(ConfigurationError, match="keys are never overwritten"):
        make_keys(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before
    with pytest.raises(ConfigurationError, match="could not write"):
        make_keys(tmp_path / "no" / "key")


def test_a_passphrase_protects_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, "correct horse")
    make_keys(tmp_path / "key")
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    load_private_key(tmp_path / "key")
    for phrase in ("wrong", ""):
        monkeypatch.setenv(PASSPHRASE, phrase)
        with pytest.raises(ConfigurationError, match="is not its passphrase"):
            load_private_key(tmp_path / "key")


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "ec.pub").write_bytes(other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ConfigurationError, match="is not an Ed25519 key"):
        load_private_key(tmp_path / "ec")
    with pytest.raises(ConfigurationError, match="is not an Ed25519 key"):
        load_public_key(tmp_path / "ec.pub")
    (tmp_path / "large").write_bytes(b"x" * (1 << 17))
    with pytest.raises(ConfigurationError, match="too large"):
        load_public_key(tmp_path / "large")


@pytest.mark.parametrize("place", ["", ".", "a\0b", 5, None])
def test_a_key_needs_the_name_of_a_file(place: Any) -> None:
    with pytest.raises(ConfigurationError):
        make_keys(place)


@pytest.mark.parametrize("key", [5, b"abc", object(), [], "a\0b"])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError):
        load_private_key(key)
    with pytest.raises(ConfigurationError):
        load_public_key(key)


@pytest.mark.parametrize("keys", [5, b"abc", [5], ["a\0b"]])
def test_one_key_of_several_that_is_none_is_refused(keys: Any) -> None:
    with pytest.raises(ConfigurationError):
        load_public_keys(keys)
