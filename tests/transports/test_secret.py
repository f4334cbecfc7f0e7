"""The job's secret: where it comes from, what is refused, and that nothing shows it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

import rrfp
from rrfp.errors import ConfigError
from rrfp.transports.base import TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.secret import MIN_BYTES, Secret, new_secret

TEXT = "0123456789abcdef" * 2


def written(path: Path, text: str = TEXT, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def read_from(**environ: str) -> Secret | None:
    return Secret.from_environment(environ)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_and_a_variable_give_the_same_secret_whatever_the_white_space(tmp_path: Path, mode: int) -> None:
    from_file = read_from(RRFP_SECRET_FILE=written(tmp_path / "secret", f"{TEXT}\n", mode))
    from_variable = read_from(RRFP_SECRET=f" {TEXT}\t")
    assert from_file is not None
    assert from_variable is not None
    assert from_file.mac("x") == from_variable.mac("x") == Secret(TEXT.encode()).mac("x")


def test_without_a_variable_there_is_none() -> None:
    assert read_from() is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused_by_name_and_mode(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "secret", mode=mode)
    with pytest.raises(ConfigError, match=f"RRFP_SECRET_FILE is '{path}' with mode {mode:04o}.*must have mode 0600"):
        read_from(RRFP_SECRET_FILE=path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "secret")
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match=f"'{path}', which belongs to user 65534, must belong to 0"):
        read_from(RRFP_SECRET_FILE=path)


def test_what_is_no_ordinary_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(ConfigError, match="is no ordinary file"):
            read_from(RRFP_SECRET_FILE=str(path))
    for name in ("absent", "\0"):
        with pytest.raises(ConfigError, match=r"RRFP_SECRET_FILE is .* cannot be read"):
            read_from(RRFP_SECRET_FILE=str(tmp_path / name))


def test_both_variables_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RRFP_SECRET and RRFP_SECRET_FILE are set, only one may be"):
        read_from(RRFP_SECRET=TEXT, RRFP_SECRET_FILE=written(tmp_path / "secret"))


@pytest.mark.parametrize("text", ["", "short", "x" * (MIN_BYTES - 1), " " * 40])
def test_short_secrets_are_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    held = len(text.strip())
    for environ in ({"RRFP_SECRET": text}, {"RRFP_SECRET_FILE": written(tmp_path / "file", text)}):
        with pytest.raises(ConfigError, match=f"holds {held} bytes, must hold at least 32; `rrfp secret`") as caught:
            read_from(**environ)
        assert held < 10 or text not in str(caught.value)


def test_a_large_file_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        read_from(RRFP_SECRET_FILE=written(tmp_path / "secret", "x" * 5000))


def test_nothing_shows_a_secret() -> None:
    secret = read_from(RRFP_SECRET=TEXT)
    context = TransportContext(0, (1,), "run", LocalRendezvous(), secret=secret)
    for text in (repr(secret), str(secret), f"{secret!r}", repr(context)):
        assert TEXT not in text
        assert "RRFP_SECRET" in text
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


def test_macs_depend_on_the_secret_and_on_where_each_part_ends() -> None:
    secret = Secret(TEXT.encode())
    macs = [secret.mac("a", "bc"), secret.mac("ab", "c"), secret.mac("abc"), secret.mac("abc", ""), secret.mac()]
    macs += [Secret(TEXT[::-1].encode()).mac("abc"), secret.mac(1), secret.mac(11)]
    assert len(set(macs)) == len(macs)
    assert secret.mac(1) == secret.mac("1") == secret.mac(b"1")


def test_new_secrets_differ_and_are_long_enough() -> None:
    assert new_secret() != new_secret()
    assert len(new_secret()) >= MIN_BYTES


def test_a_secret_with_allow_insecure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allow_insecure is True although there is a RRFP_SECRET: leave .* or unset"):
        TransportContext(0, (1,), "run", LocalRendezvous(), secret=read_from(RRFP_SECRET=TEXT), allow_insecure=True)


def test_a_pipeline_reads_the_secret_and_refuses_allow_insecure_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[TransportContext] = []

    def transport(context: TransportContext) -> InprocTransport:
        contexts.append(context)
        return InprocTransport(context)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()

    monkeypatch.setenv("RRFP_SECRET", TEXT)
    place, module = rrfp.Topology(0, 1), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="allow_insecure is True although there is a RRFP_SECRET"):
        rrfp.Pipeline(module, topology=place, loss_fn=loss_fn, allow_insecure=True)
    with rrfp.Pipeline(module, topology=place, loss_fn=loss_fn, transport=transport, data="plain").blocking():
        pass
    assert [(context.secret is not None, context.plain_data) for context in contexts] == [(True, True)]
