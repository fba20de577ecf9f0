"""From which stage each reader gets a tensor that several stages read: a rule that steps and their costs share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence


def sources_of(
    maker: int, readers: Iterable[int], relays: Collection[int], devices: Sequence[Hashable]
) -> dict[int, int]:
    """Maps each reader of a tensor to the stage that it gets the tensor from: the nearest one that has it.

        made by 0, read by 1, 2 and 3, relays {1, 2}:   0 -> 1 -> 2 -> 3
        the same with stages 0 and 2 on one device:     0 -> 1 -> 3,  0 -> 2

    That is the last stage before it on the same devices, if there is one, else the last before it. Only the maker and
    the relays among the readers are considered. A gradient takes the same way back.

    Args:
        maker: the stage that makes the tensor.
        readers: later stages that read it.
        relays: the stages that hand on what they read.
        devices: each stage's devices, in the order of its replicas.
    """
    holders, sources = [maker], {}
    for reader in sorted(readers):
        near = [stage for stage in holders if devices[stage] == devices[reader]]
        sources[reader] = (near or holders)[-1]
        if reader in relays:
            holders.append(reader)
    return sources
