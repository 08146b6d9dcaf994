"""A bundle passes a site's boundary only if it is what the method declared."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiny import context, study
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope, Kind
from wardround.exchange.payload import SIZE_GROUP, Group, Payload, network_groups
from wardround.methods.base import split_groups
from wardround.methods.ensemble import Ensemble
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import known, make
from wardround.models import NetSpec, spec_layout

Groups = dict[str, dict[str, Tensor]]
FIXED = Group("parameters", "weights", 100, {"w": ((2, 3), "float32"), "b": ((2,), "float32")})
FREE = Group("features", "anything", 16)
PAYLOAD = Payload(up=(FIXED, FREE), down=(FIXED,), home=(replace(FIXED, partial=True),))


def whole() -> Groups:
    return {"parameters": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}}


def bundle(kind: Kind, groups: Groups) -> Bundle:
    return Bundle(Envelope(kind, "study", "toy", "site-1", 1), groups)


def test_takes_what_was_declared() -> None:
    PAYLOAD.check(bundle("answer", whole()))
    PAYLOAD.check(bundle("answer", {**whole(), "features": {"any name": torch.zeros(4)}}))
    PAYLOAD.check(bundle("request", whole()))


def test_refuses_an_undeclared_group_by_name() -> None:
    with pytest.raises(BadInput, match=r"answer of site-1 in round 2 holds group 'images', which toy did not declare"):
        PAYLOAD.check(bundle("answer", {**whole(), "images": {"x": torch.zeros(1)}}))


def test_refuses_even_an_empty_undeclared_group() -> None:
    with pytest.raises(BadInput, match="holds group 'images'"):
        PAYLOAD.check(bundle("answer", {**whole(), "images": {}}))


def test_each_direction_has_its_own_declaration() -> None:
    with pytest.raises(BadInput, match=r"request .* holds group 'features'"):
        PAYLOAD.check(bundle("request", {**whole(), "features": {"f": torch.zeros(1)}}))


def test_where_nothing_is_declared_nothing_passes() -> None:
    with pytest.raises(BadInput, match=r"did not declare \(nothing\)"):
        Payload().check(bundle("delivery", whole()))
    Payload().check(bundle("delivery", {}))


def edit(change: Callable[[dict[str, Tensor]], object]) -> Bundle:
    groups = whole()
    change(groups["parameters"])
    return bundle("answer", groups)


def test_refuses_a_wrong_shape() -> None:
    with pytest.raises(BadInput, match=r"parameters/w is \(\(3, 2\), 'float32'\), declared is \(\(2, 3\), 'float32'\)"):
        PAYLOAD.check(edit(lambda tensors: tensors.update(w=torch.zeros(3, 2))))


def test_refuses_a_wrong_dtype() -> None:
    with pytest.raises(BadInput, match=r"parameters/b is \(\(2,\), 'int32'\)"):
        PAYLOAD.check(edit(lambda tensors: tensors.update(b=torch.zeros(2, dtype=torch.int32))))


def test_refuses_an_undeclared_tensor() -> None:
    with pytest.raises(BadInput, match=r"parameters/c is .*, declared is no such tensor"):
        PAYLOAD.check(edit(lambda tensors: tensors.update(c=torch.zeros(1))))


def test_refuses_too_many_bytes_where_shapes_are_free() -> None:
    PAYLOAD.check(bundle("answer", {**whole(), "features": {"f": torch.zeros(4)}}))
    with pytest.raises(BadInput, match="group 'features' has 20 bytes, declared are 16"):
        PAYLOAD.check(bundle("answer", {**whole(), "features": {"f": torch.zeros(5)}}))


def test_bytes_are_counted_over_the_whole_group() -> None:
    with pytest.raises(BadInput, match="has 24 bytes"):
        PAYLOAD.check(bundle("answer", {**whole(), "features": {"f": torch.zeros(3), "g": torch.zeros(3)}}))


@pytest.mark.parametrize("kind", ["answer", "request"])
def test_refuses_a_missing_tensor(kind: Kind) -> None:
    """A site that leaves out a layer would otherwise end the round in the middle of the average."""
    with pytest.raises(BadInput, match=f"the {kind} of site-1 in round 2 lacks parameters/b, which toy declared"):
        PAYLOAD.check(bundle(kind, {"parameters": {"w": torch.zeros(2, 3)}}))


def test_refuses_a_missing_group_of_fixed_tensors() -> None:
    with pytest.raises(BadInput, match="lacks parameters/b"):
        PAYLOAD.check(bundle("answer", {}))


def test_a_partial_group_may_lack_tensors_but_not_change_them() -> None:
    PAYLOAD.check(bundle("delivery", {"parameters": {"w": torch.zeros(2, 3)}}))
    PAYLOAD.check(bundle("delivery", {}))
    with pytest.raises(BadInput, match="parameters/w"):
        PAYLOAD.check(bundle("delivery", {"parameters": {"w": torch.zeros(6)}}))


def test_an_occasional_group_comes_whole_or_not_at_all() -> None:
    """Half of one would end the round where a method looks for the other half."""
    payload = Payload(up=(replace(FIXED, occasional=True),))
    payload.check(bundle("answer", whole()))
    payload.check(bundle("answer", {}))
    with pytest.raises(BadInput, match="lacks parameters/b, which toy declared"):
        payload.check(bundle("answer", {"parameters": {"w": torch.zeros(2, 3)}}))


@pytest.mark.parametrize(
    ("name", "group"), [("fedcurv", "fisher"), ("fedmr", "prototypes"), ("elastic", "sensitivity")]
)
def test_half_of_what_a_method_sends_now_and_then_is_refused(name: str, group: str) -> None:
    declared = make(name, {}).payload(study(), "site-1")
    groups = {
        up.name: {n: torch.zeros(shape, dtype=getattr(torch, kind)) for n, (shape, kind) in (up.tensors or {}).items()}
        for up in declared.up
    }
    declared.check(bundle("answer", groups))
    left_out = max(groups[group])
    del groups[group][left_out]
    with pytest.raises(BadInput, match=f"lacks {group}/{left_out}"):
        declared.check(bundle("answer", groups))


def test_network_groups_are_the_whole_network() -> None:
    spec = NetSpec("small", 3, 4, 8, width=2)
    layout = spec_layout(spec)
    groups = {group.name: group for group in network_groups(spec)}
    assert list(groups) == ["parameters", "statistics", "counters"]
    assert [name for group in groups.values() for name in group.tensors or {}] == sorted(
        layout.names, key=lambda name: (list(groups).index(layout.groups[name]), layout.names.index(name))
    )
    assert groups["parameters"].max_bytes == 4 * layout.parameter_count
    assert groups["counters"].max_bytes == 8 * len(groups["counters"].tensors or {})


def test_network_groups_of_some_tensors() -> None:
    spec = NetSpec("small", 3, 4, 8, width=2)
    (head,) = network_groups(spec, frozenset({"head.bias"}))
    assert (head.name, head.max_bytes, head.tensors) == ("parameters", 16, {"head.bias": ((4,), "float32")})


def test_a_network_without_batch_norm_has_one_group() -> None:
    assert [group.name for group in network_groups(NetSpec("cnn4", 3, 4, 8, width=2))] == ["parameters"]


def test_fedavg_demands_the_number_of_images() -> None:
    ctx = context(study())
    groups = split_groups(ctx, "site-1", ctx.study.initial())
    payload = FedAvg().payload(ctx.study, "site-1")
    payload.check(ctx.bundle("answer", "site-1", {**groups, "size": {"images": torch.tensor(3)}}))
    with pytest.raises(BadInput, match="lacks size/images"):
        payload.check(ctx.bundle("answer", "site-1", groups))
    with pytest.raises(BadInput, match="holds group 'size'"):
        payload.check(ctx.bundle("request", "site-1", {**groups, "size": {"images": torch.tensor(3)}}))


def test_the_number_of_images_is_eight_bytes() -> None:
    assert SIZE_GROUP.max_bytes == 8
    Payload(up=(SIZE_GROUP,)).check(bundle("answer", {"size": {"images": torch.tensor(3)}}))
    with pytest.raises(BadInput, match="size/images"):
        Payload(up=(SIZE_GROUP,)).check(bundle("answer", {"size": {"images": torch.tensor([3])}}))


def test_an_ensemble_may_bring_home_fewer_models_than_there_are_sites() -> None:
    """Sites too small to train are left out, whole; what comes is still checked tensor by tensor."""
    ctx = context(study(method="ensemble"))
    model = {f"site-2/{name}": tensor for name, tensor in ctx.study.initial().items()}
    kinds = spec_layout(ctx.study.common_spec).groups
    groups: Groups = {}
    for name, tensor in model.items():
        groups.setdefault(kinds[name.partition("/")[2]], {})[name] = tensor
    payload = Ensemble().payload(ctx.study, "site-1")
    payload.check(ctx.bundle("delivery", "site-1", groups))
    groups["parameters"]["site-9/head.bias"] = torch.zeros(4)
    with pytest.raises(BadInput, match=r"site-9/head\.bias"):
        payload.check(ctx.bundle("delivery", "site-1", groups))


@pytest.mark.parametrize("name", list(known()))
def test_every_method_says_in_words_what_leaves_and_who_sees_it(name: str) -> None:
    payload = known()[name]().payload(study(method=name), "site-1")
    assert payload.seen_by
    for group in (*payload.up, *payload.down, *payload.home):
        assert group.what
        assert group.max_bytes > 0
