"""What a hash table keeps of its rows, by RecIS's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torch_dynemb.ops.columns import Meta
from torch_dynemb.optim import Adam, AdamW, AdamWTF, OptimizerConfig
from torch_dynemb.table.group import TableGroup

EMBEDDING = "embedding"
# what RecIS puts before the names of an optimizer's state
_PREFIXES: dict[type[OptimizerConfig], str] = {
    Adam: "sparse_adam_",
    AdamW: "sparse_adamw_",
    AdamWTF: "sparse_adamw_tf_",
}


class Slot:
    """One thing that is kept of every row: the row itself, or a moment of it.

    Args:
        name: of it.
        read: gives what :meth:`value` returns, as [rows, columns].
    """

    def __init__(self, name: str, read: Callable[[], Tensor]) -> None:
        self._name, self._read = name, read

    def name(self) -> str:
        """``embedding``, or the name in the optimizer's state."""
        return self._name

    def value(self) -> Tensor:
        """A copy for all row numbers, [rows, columns]: ``value()[ids_map().rows]`` is of the ids.

        Rows of all children are there, and what nobody's rows hold.

        Raises:
            RuntimeError: rows lie in a store.
        """
        return self._read()

    def values(self) -> list[Tensor]:
        """:meth:`value` as the only block."""
        return [self.value()]


class SlotGroup(dict[str, Tensor]):
    """A copy of what a child's ids have, by name: [n, ...] in the order of ``HashTable.ids()``.

    Args:
        content: float [n, columns] each, by name.
        slots: by name, of the rows of all children.
        prefix: what RecIS puts before the names of the optimizer's state.
    """

    def __init__(self, content: Mapping[str, Tensor], slots: Mapping[str, Slot], prefix: str):
        super().__init__(content)
        self._slots, self._prefix = dict(slots), prefix

    def slots(self) -> list[Slot]:
        """``embedding``, then the optimizer's state."""
        return list(self._slots.values())

    def slot_by_index(self, index: int) -> Slot:
        """One of :meth:`slots`.

        Args:
            index: its place in the list.

        Raises:
            IndexError: there are fewer.
        """
        return self.slots()[index]

    def slot_by_name(self, name: str) -> Slot:
        """The slot of a name; ``sparse_adam_exp_avg`` is ``exp_avg`` of SparseAdam, and so on.

        Args:
            name: of the slot, with or without RecIS's prefix.

        Raises:
            KeyError: there is none.
        """
        found = self._slots.get(name) or self._slots.get(name.removeprefix(self._prefix))
        if found is None:
            raise KeyError(f"slot_by_name: there is no slot {name!r}, expected one of {list(self)}")
        return found


def slot_group(
    group: TableGroup, table: int, content: Mapping[str, Tensor], floats: Callable[[Tensor], Tensor]
) -> SlotGroup:
    """The slots of a table.

    Args:
        group: of the table.
        table: its number in the group.
        content: see :class:`SlotGroup`.
        floats: rows as they are given to users, from rows as they are stored.
    """
    slab, slabs = int(group.index.meta[table, Meta.SLAB]), len(group.config.slabs)

    def check() -> None:
        group.tables.check_in_memory(
            "Slot.value", "the slot group itself has the rows of a child, and export() batches"
        )
        group.materialize()

    def rows() -> Tensor:
        check()
        return floats(group.rows.weights[slab][: group.index.used_rows(slab)].clone())

    def state_of(place: int) -> Callable[[], Tensor]:
        def state() -> Tensor:
            check()
            tensor = group.rows.state[place * slabs + slab][: group.index.used_rows(slab)].clone()
            return tensor if tensor.dim() == 2 else tensor[:, None]

        return state

    config = group.config.optimizer
    slots = {EMBEDDING: Slot(EMBEDDING, rows)}
    for place, tensor in enumerate(() if config is None else config.state):
        slots[tensor.name] = Slot(tensor.name, state_of(place))
    prefix = "" if config is None else _PREFIXES.get(type(config), "")
    return SlotGroup(content, slots, prefix)


__all__ = ["EMBEDDING", "Slot", "SlotGroup", "slot_group"]
