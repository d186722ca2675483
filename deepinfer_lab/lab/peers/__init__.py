"""Other people's few-bit kernels, each behind the same small interface, to be timed beside ours."""

from collections.abc import Sequence

from deepinfer_lab.errors import MissingDependency, SettingError
from deepinfer_lab.lab.peers.gemlite import GemLite
from deepinfer_lab.lab.peers.humming import Humming
from deepinfer_lab.lab.peers.peer import Peer
from deepinfer_lab.lab.peers.tinygemm import TinyGemm

PEERS: dict[str, Peer] = {peer.name: peer for peer in (TinyGemm(), Humming(), GemLite())}


def check_names(names: Sequence[str] | None) -> None:
    """Raise a SettingError for the first name that no peer has, installed or not."""
    for name in names or ():
        if name not in PEERS:
            raise SettingError(f"peer {name!r}: allowed are {', '.join(PEERS)}")


def find(names: Sequence[str] | None = None) -> list[Peer]:
    """tinygemm where this torch has it, and the peers of these names; without names, all that are installed.

    Raises:
        SettingError: an unknown name.
        MissingDependency: one that was asked for is not installed.
    """
    check_names(names)
    for name in names or ():
        reason = PEERS[name].missing()
        if reason is not None:
            raise MissingDependency(f"peer {name!r}: {reason}")
    wanted = PEERS if names is None else {TinyGemm.name, *names}
    return [peer for name, peer in PEERS.items() if name in wanted and peer.missing() is None]


__all__ = ["PEERS", "Peer", "check_names", "find"]
