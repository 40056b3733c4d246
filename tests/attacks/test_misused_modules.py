"""Models that refer to themselves, cannot be copied, are wrapped, or change behind the task's back."""

import functools
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attacks.cases import CLASSES, QUERIES, Case, Table, columns, judge, mlp, register
from tests.attacks.test_misused_models import HIDDEN, LIVE, Around, weight

MODULES: Table = {}
attack = register(MODULES)


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_silently_misread(name: str) -> None:
    judge(MODULES[name])


def scaled(model: Any, h: Tensor) -> Tensor:
    out: Tensor = model.head(h * model.scale)
    return out


def with_scale(last: Any = scaled) -> Any:
    return Around(last, scale=nn.Parameter(weight(4)))


# --- modules that refer to the live model: a copy of such a module would still compute with the original


@attack("honest", LIVE)
def a_lambda_that_captures_the_model() -> Case:
    model = with_scale(lambda self, h: self.head(self.act(h)))
    model.act = lambda h: h * model.scale
    return Case(model)


@attack("honest", LIVE)
def a_bound_method_kept_as_an_attribute() -> Case:
    class Bound(Around):
        def activate(self, h: Tensor) -> Tensor:
            out: Tensor = h * self.scale  # type: ignore[operator]
            return out

    model = Bound(lambda self, h: self.head(self.act(h)), scale=nn.Parameter(weight(4)))
    model.act = model.activate  # type: ignore[assignment]
    return Case(model)


@attack("honest", LIVE)
def a_partial_with_the_model_in_it() -> Case:
    model = with_scale(lambda self, h: self.act(h))
    model.act = functools.partial(scaled, model)
    return Case(model)


@attack("honest", LIVE)
def a_table_of_bound_methods() -> Case:
    model = with_scale(lambda self, h: self.routes["head"](h))
    model.routes = {"head": model.head.forward}
    return Case(model)


@attack("honest", LIVE)
def a_forward_that_was_patched_in() -> Case:
    model = mlp()

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self[2](self[0](x).tanh()) * 2
        return out

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return Case(model)


@attack("honest", LIVE)
def a_forward_that_was_wrapped() -> Case:
    model = mlp()
    original: Any = model.forward
    model.forward = lambda x: 3 * original(x)  # type: ignore[method-assign]
    return Case(model)


@attack("honest", LIVE)
def a_forward_of_a_layer_that_was_wrapped() -> Case:
    model = mlp()
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    return Case(model)


@attack("honest", LIVE)
def a_child_that_knows_its_parent() -> Case:
    class Child(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = h * self.parent[0].scale  # type: ignore[index, union-attr]
            return out

    model = with_scale(lambda self, h: self.head(self.child(h)))
    model.child = Child()
    model.child.parent = [model]
    return Case(model)


@attack("honest", LIVE)
def a_child_with_a_weak_reference_to_its_parent() -> Case:
    class Child(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = h * self.parent().scale  # type: ignore[operator]
            return out

    model = with_scale(lambda self, h: self.head(self.child(h)))
    model.child = Child()
    model.child.parent = weakref.ref(model)
    return Case(model)


@attack("honest", LIVE)
def a_hook_that_is_a_method_of_the_model() -> Case:
    class Hooked(Around):
        def rescale(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
            out: Tensor = output * self.scale  # type: ignore[operator]
            return out

    model = Hooked(lambda self, h: self.head(h), scale=nn.Parameter(weight(4)))
    model.first.register_forward_hook(model.rescale)
    return Case(model)


@attack("honest", LIVE)
def a_hook_with_a_weight_of_the_model() -> Case:
    model = with_scale(lambda self, h: self.head(h))
    kept = model.scale
    model.first.register_forward_hook(lambda module, given, output: output * kept)
    return Case(model)


@attack("honest", LIVE)
def weights_listed_beside_their_modules() -> Case:
    model = Around(lambda self, h: F.linear(h, self.weights[1], self.head.bias))
    model.weights = [model.first.weight, model.head.weight]  # type: ignore[assignment]
    return Case(model)


@attack("honest", LIVE)
def modules_listed_beside_their_registration() -> Case:
    model = Around(lambda self, h: self.order[0](h))
    model.order = [model.head]  # type: ignore[assignment]
    return Case(model)


@attack("honest", LIVE)
def a_model_in_a_registry_by_name() -> Case:
    registry: dict[str, Any] = {}
    model = Around(lambda self, h: registry["main"].head(h))
    registry["main"] = model
    return Case(model)


# --- models that cannot be copied, or come out otherwise when they are


class Stubborn(Around):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(lambda self, h: self.head(h), **attributes)


@attack("honest", "cop")
def a_model_with_a_lock() -> Case:
    return Case(Stubborn(lock=threading.Lock()))


@attack("honest", "cop")
def a_model_with_a_thread() -> Case:
    return Case(Stubborn(thread=threading.Thread(target=print), local=threading.local()))


@attack("honest", "cop")
def a_model_with_a_generator() -> Case:
    return Case(Stubborn(rows=(i for i in range(3)), generator=torch.Generator()))


@attack("honest", "cop")
def a_model_with_an_open_file() -> Case:
    with open(__file__) as file:  # noqa: PTH123
        return Case(Stubborn(file=file))


@attack("honest", "cop")
def a_model_that_refuses_to_be_copied() -> Case:
    class Refusing(Stubborn):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

        __copy__ = __reduce_ex__ = __deepcopy__

    return Case(Refusing())


@attack("honest", LIVE)
def a_model_that_says_it_is_its_own_copy() -> Case:
    class Lying(Stubborn):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __copy__(self) -> Any:
            return self

    return Case(Lying())


@attack("honest", LIVE)
def a_model_whose_copies_are_fresh() -> Case:
    class Fresh(Stubborn):
        def __deepcopy__(self, memo: Any) -> Any:
            return Fresh()

        def __copy__(self) -> Any:
            return Fresh()

    return Case(Fresh())


@attack("honest", "cop")
def a_model_that_keeps_a_result_with_its_graph() -> Case:
    """A tensor with a graph cannot be deep-copied."""
    model = Around(lambda self, h: self.head(h))
    model.last_output = model(columns()[0])
    return Case(model)


@attack("honest", "cop")
def a_model_with_slots() -> Case:
    class Slotted(Stubborn):
        __slots__ = ("extra",)

    model = Slotted()
    model.extra = nn.Parameter(weight(4))
    return Case(model)


@attack("honest", HIDDEN)
def a_model_that_hides_its_parameters() -> Case:
    class Hiding(Stubborn):
        def named_parameters(self, *given: Any, **options: Any) -> Any:
            return ((name, p) for name, p in super().named_parameters(*given, **options) if "first" not in name)

    model = Hiding()
    return Case(model, trained=[*model.first.parameters(), *model.head.parameters()])


@attack("honest", "state")
def a_model_with_a_state_dict_of_its_own() -> Case:
    class Renaming(Stubborn):
        def state_dict(self, *given: Any, **options: Any) -> Any:
            state = super().state_dict(*given, **options)
            return {f"net.{name}": tensor for name, tensor in state.items()} if not given else state

    return Case(Renaming())


@attack("works")
def a_model_that_finds_attributes_in_what_it_wraps() -> Case:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = mlp()

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.module(x)
            return out

    return Case(Wrapper())


# --- wrapped, traced, lazy, in other precisions


@attack("honest")
def a_scripted_model() -> Case:
    return Case(torch.jit.script(mlp()))


@attack("honest")
def a_traced_model() -> Case:
    return Case(torch.jit.trace(mlp(), columns()[0]))


@attack("honest")
def a_model_with_a_scripted_layer() -> Case:
    return Case(Around(lambda self, h: self.head(self.body(h)), body=torch.jit.script(nn.Linear(4, 4).double())))


@attack("honest")
def a_data_parallel_model() -> Case:
    return Case(nn.DataParallel(mlp()))


@attack("honest")
def an_averaged_model() -> Case:
    return Case(torch.optim.swa_utils.AveragedModel(mlp()))


@attack("speaks")
def a_model_without_values() -> Case:
    return Case(mlp().to("meta"), truth=False)


@attack("speaks")
def a_model_partly_without_values() -> Case:
    model = mlp()
    model[0].to("meta")
    return Case(model, truth=False)


@attack("speaks")
def a_lazy_model() -> Case:
    return Case(nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Linear(4, CLASSES).double()), truth=False)


@attack("speaks", "half|bfloat16|float16")
def a_model_in_bfloat16() -> Case:
    x, y = columns()
    asked = columns(QUERIES, 2)
    return Case(mlp().bfloat16(), data=(x.bfloat16(), y), queries=(asked[0].bfloat16(), asked[1]), truth=False)


@attack("speaks", "half|bfloat16|float16")
def a_model_partly_in_float16() -> Case:
    model = Around(lambda self, h: self.head(h.half()).double())
    model.head.half()
    return Case(model, truth=False)


@attack("speaks", "half|bfloat16|float8|precision")
def a_model_with_weights_in_float8() -> Case:
    model = Around(lambda self, h: self.head(h) * self.small.double())
    model.small = nn.Parameter(torch.ones(CLASSES).to(torch.float8_e4m3fn))
    return Case(model, truth=False)


@attack("speaks")
def a_model_in_float32_on_data_in_float64() -> Case:
    return Case(mlp().float(), truth=False)


@attack("speaks")
def a_model_without_any_parameter() -> Case:
    return Case(nn.Identity(), truth=False)


@attack("speaks")
def a_quantity_that_is_no_module() -> Case:
    return Case(mlp().state_dict(), lambda model, batch: batch[0].sum(1), truth=False)  # type: ignore[arg-type]
