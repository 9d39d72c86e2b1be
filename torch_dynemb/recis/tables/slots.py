"""Slots: rows and optimizer state of a hash table, by RecIS's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torch_dynemb.ops.columns import Meta
from torch_dynemb.ops.row_copies import copied_rows
from torch_dynemb.optim import Adagrad, Adam, AdamW, AdamWTF, OptimizerConfig, RowWiseAdagrad
from torch_dynemb.table import TableGroup

EMBEDDING = "embedding"
# RecIS's prefixes of the names of optimizer state
_PREFIXES: dict[type[OptimizerConfig], str] = {
    Adagrad: "sparse_adagrad_state_",
    RowWiseAdagrad: "sparse_row_wise_adagrad_state_",
    Adam: "sparse_adam_",
    AdamW: "sparse_adamw_",
    AdamWTF: "sparse_adamw_tf_",
}


class Slot:
    """One tensor of each row: the row itself, or a moment.

    Args:
        name: of the slot.
        read: reads the result of :meth:`value`, as [rows, columns].
    """

    def __init__(self, name: str, read: Callable[[], Tensor]) -> None:
        self._name, self._read = name, read

    def name(self) -> str:
        """Return ``embedding``, or the name in the optimizer's state."""
        return self._name

    def value(self) -> Tensor:
        """Copy all row numbers, [rows, columns]: ``value()[ids_map().rows]`` belongs to the ids.

        The copy has rows of all children, and unused rows.

        Raises:
            RuntimeError: rows lie in a store.
        """
        return self._read()

    def values(self) -> list[Tensor]:
        """Return :meth:`value` as the only block."""
        return [self.value()]


class SlotGroup(dict[str, Tensor]):
    """Copy of a child's rows and state by name: [n, ...] in the order of ``HashTable.ids()``.

    Args:
        content: float [n, columns] each, by name.
        slots: by name, of the rows of all children.
        prefix: RecIS's prefix of the names of the optimizer's state.
    """

    def __init__(self, content: Mapping[str, Tensor], slots: Mapping[str, Slot], prefix: str):
        super().__init__(content)
        self._slots, self._prefix = dict(slots), prefix

    def slots(self) -> list[Slot]:
        """Return ``embedding``, then the optimizer's state."""
        return list(self._slots.values())

    def slot_by_index(self, index: int) -> Slot:
        """Return one of :meth:`slots`.

        Args:
            index: its position in the list.

        Raises:
            IndexError: ``index`` is out of range.
        """
        return self.slots()[index]

    def slot_by_name(self, name: str) -> Slot:
        """Return the slot of a name, such as ``sparse_adam_exp_avg`` or ``exp_avg`` for SparseAdam.

        Args:
            name: of the slot, with or without RecIS's prefix.

        Raises:
            KeyError: the name is unknown.
        """
        found = self._slots.get(name) or self._slots.get(name.removeprefix(self._prefix))
        if found is None:
            raise KeyError(f"slot_by_name: name is {name!r}, expected one of {list(self)}")
        return found


def slot_group(
    group: TableGroup, table: int, content: Mapping[str, Tensor], floats: Callable[[Tensor], Tensor]
) -> SlotGroup:
    """Return the slots of a table.

    Args:
        group: of the table.
        table: its number in the group.
        content: see :class:`SlotGroup`.
        floats: converts stored rows to rows for users.
    """
    slab, slabs = int(group.index.meta[table, Meta.SLAB]), len(group.config.slabs)

    def check() -> None:
        group.tables.check_in_memory(
            "Slot.value", "the slot group itself has the rows of a child, and export() batches"
        )
        group.materialize()

    def rows() -> Tensor:
        check()
        return floats(copied_rows(group.rows.weights[slab][: group.index.used_rows(slab)]))

    def state_of(place: int) -> Callable[[], Tensor]:
        def state() -> Tensor:
            check()
            rows = group.rows.state[place * slabs + slab][: group.index.used_rows(slab)]
            tensor = copied_rows(rows)
            return tensor if tensor.dim() == 2 else tensor[:, None]

        return state

    config = group.config.optimizer
    slots = {EMBEDDING: Slot(EMBEDDING, rows)}
    for place, tensor in enumerate(() if config is None else config.state):
        slots[tensor.name] = Slot(tensor.name, state_of(place))
    prefix = "" if config is None else _PREFIXES.get(type(config), "")
    return SlotGroup(content, slots, prefix)


__all__ = ["EMBEDDING", "Slot", "SlotGroup", "slot_group"]
