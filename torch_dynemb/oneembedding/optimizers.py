"""Optimizers that :class:`Optimizer` accepts: torch's, and two that OneEmbedding adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import optim
from torch_dynemb.argument_checks import number
from torch_dynemb.optim import OptimizerConfig


class SmartDecayAdam(torch.optim.Adam):
    """Adam with rows that catch up with the steps since their last update.

    Parameters are updated as by torch.optim.Adam, rows as by :class:`torch_dynemb.SmartDecayAdam`.

    Args:
        params: parameters, or param groups.
        lr, betas, eps, weight_decay: as in torch.optim.Adam.

    Raises:
        TypeError, ValueError: a wrong value.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Ftrl(torch.optim.Optimizer):
    r"""FTRL-Proximal (McMahan et al. 2013) for parameters and rows.

    s' = s + g^2; z += g - (s'^-p - s^-p) / lr * w;
    w = 0 where \|z\| <= lambda1, else (sign(z) * lambda1 - z) / ((beta + s'^-p) / lr + lambda2),
    where p is ``lr_power``. Rows are updated as by :class:`torch_dynemb.Ftrl`, which has p = -0.5.

    Args:
        params: parameters, or param groups.
        lr: above 0.
        weight_decay: at least 0: ``weight_decay * w`` is added to g.
        lr_power: at most 0; must be -0.5 to train rows of embeddings.
        initial_accumulator_value: initial value of s, at least 0.
        lambda1, lambda2, beta: at least 0.

    Raises:
        TypeError, ValueError: a wrong value.

    Example:
        >>> import torch
        >>> from torch_dynemb import oneembedding
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> ftrl = oneembedding.Ftrl([weight], lr=0.5, lambda1=2.0)
        >>> weight.square().sum().backward()
        >>> ftrl.step()
        >>> weight.data.tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        least_zero = {
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "lambda1": lambda1,
            "lambda2": lambda2,
            "beta": beta,
        }
        for name, value in least_zero.items():
            if not number(f"Ftrl: {name}", value) >= 0:
                raise ValueError(f"Ftrl: {name} is {value}, expected at least 0")
        if not number("Ftrl: lr", lr) > 0:
            raise ValueError(f"Ftrl: lr is {lr}, expected more than 0: FTRL divides by it")
        if not number("Ftrl: lr_power", lr_power) <= 0:
            raise ValueError(f"Ftrl: lr_power is {lr_power}, expected at most 0")
        super().__init__(params, {"lr": lr, "lr_power": lr_power, **least_zero})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The result of ``closure``, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])
            state["linear"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
        power, rate = -group["lr_power"], group["lr"]
        before = state["sum"].pow(power)
        state["sum"].addcmul_(gradient, gradient)
        after = state["sum"].pow(power)
        linear = state["linear"]
        linear.add_(gradient).addcmul_((after - before).div_(rate), parameter, value=-1)
        shrunk = linear.sign().mul_(group["lambda1"]).sub_(linear)
        divisor = after.add_(group["beta"]).div_(rate).add_(group["lambda2"])
        parameter.copy_(
            torch.where(
                linear.abs() <= group["lambda1"], torch.zeros_like(linear), shrunk / divisor
            )
        )


def config_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> OptimizerConfig:
    """Return the optimizer config of rows that matches a param group of a torch optimizer.

    Args:
        optimizer: SGD, Adam, AdamW, Adagrad, RMSprop or Adadelta of torch.optim, or one of this
            module.
        group: one of its param groups.

    Raises:
        TypeError: the optimizer is of another type.
        ValueError: rows do not support an option of the group.
    """
    kind = type(optimizer)
    owner = f"Optimizer: {kind.__name__}"
    if kind not in _CONFIGS:
        names = [f"{known.__module__}.{known.__name__}" for known in _CONFIGS]
        raise TypeError(
            f"{owner} has no counterpart for rows, expected one of {names}: for another one of "
            "torch_dynemb, call embedding.set_optimizer(config) and embedding.optimizer.step()"
        )
    return _CONFIGS[kind](owner, group)


def _sgd(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    common = _common(group)
    if group["momentum"] == 0:
        return optim.SGD(**common)
    names = ("momentum", "nesterov", "dampening")
    return optim.MomentumSGD(**{name: group[name] for name in names}, **common)


def _adam(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    kind = optim.AMSGrad if group["amsgrad"] else optim.Adam
    return kind(
        betas=group["betas"],
        eps=group["eps"],
        decoupled_weight_decay=bool(group.get("decoupled_weight_decay")),
        **_common(group),
    )


def _adamw(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    return _adam(owner, {**group, "decoupled_weight_decay": True})


def _smart_decay_adam(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    return optim.SmartDecayAdam(betas=group["betas"], eps=group["eps"], **_common(group))


def _adagrad(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    return optim.Adagrad(
        eps=group["eps"],
        lr_decay=group["lr_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
        **_common(group),
    )


def _rmsprop(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    _expect(owner, group, "centered", False)
    names = ("alpha", "eps", "momentum")
    return optim.RMSprop(**{name: group[name] for name in names}, **_common(group))


def _adadelta(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    return optim.Adadelta(rho=group["rho"], eps=group["eps"], **_common(group))


def _ftrl(owner: str, group: dict[str, Any]) -> OptimizerConfig:
    _expect(owner, group, "lr_power", -0.5)
    return optim.Ftrl(
        l1=group["lambda1"],
        l2=group["lambda2"],
        beta=group["beta"],
        initial_accumulator_value=group["initial_accumulator_value"],
        **_common(group),
    )


def _common(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": group["weight_decay"],
        "maximize": bool(group.get("maximize")),
    }


def _expect(owner: str, group: dict[str, Any], name: str, only: float) -> None:
    if group[name] != only:
        raise ValueError(f"{owner}: {name} is {group[name]}, but rows only support {only}")


_CONFIGS: dict[type, Callable[[str, dict[str, Any]], OptimizerConfig]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
    SmartDecayAdam: _smart_decay_adam,
    Ftrl: _ftrl,
}

__all__ = ["Ftrl", "SmartDecayAdam", "config_of"]
