"""A batch spread over parallel sessions: the same answers, the same bytes, every party and link used alike; clear
limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.client import parallel_sessions as client_sessions
from private_llm_hf.party import party
from private_llm_hf.wire.commands import LoadFile, LoadLike
from transformers import PreTrainedModel

from private_llm.errors import DomainError, PartyFailed, TransportError, UnsupportedOp
from private_llm.net.parallel_sessions import assignments
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, PADDED, worst
from tests.hf.conftest import TRIO

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6], [50, 40, 30, 20], [3, 99, 4, 77]])
PLACES = [(parallel_session, number) for parallel_session in range(2) for number in range(3)]


@pytest.fixture(scope="module")
def plaintext() -> PreTrainedModel:
    return tiny.build("opt")


@pytest.fixture(scope="module")
def two(plaintext: PreTrainedModel) -> Iterator[PreTrainedModel]:
    with patch(plaintext, replace(TRIO, parallel_sessions=2)) as model:
        yield model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parallel_sessions", [2, 3, 6])
def test_every_row_gets_its_answer(plaintext: PreTrainedModel, parallel_sessions: int) -> None:
    with patch(plaintext, replace(TRIO, parallel_sessions=parallel_sessions, rotate_roles=True)) as model:
        assert worst(model(IDS).logits, plaintext(IDS).logits) < LOGIT_ERROR
        assert worst(model(IDS[:1]).logits, plaintext(IDS[:1]).logits) < LOGIT_ERROR


def test_bytes_and_rounds_are_those_of_one_parallel_session(
    plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed bits travel in words of 64 elements; here every parallel session has a multiple of 64 positions.

    Without the guard, whose last bit is one for each parallel session, and with maxima in pairs, since few rows choose
    other groups than many.
    """
    monkeypatch.setattr("private_llm.exact.maximum._group_size", lambda x, rows, width: min(width, 2))
    ids = torch.arange(8 * 16).view(8, 16) % 120 + 3
    costs = []
    for parallel_sessions in (1, 2):
        with patch(plaintext, replace(TRIO, parallel_sessions=parallel_sessions, guard=False)) as model:
            model.cost(reset=True)
            model(ids, use_cache=False)
            costs.append(model.cost())
    one, both = costs
    assert both.cost == one.cost
    assert both.by_op() == one.by_op()


@pytest.mark.full
def test_all_role_assignments_use_all_links_alike(plaintext: PreTrainedModel) -> None:
    rows = IDS.repeat(2, 1)[:6]
    with patch(plaintext, replace(TRIO, parallel_sessions=len(assignments(3)), rotate_roles=True)) as model:
        model.cost(reset=True)
        model(rows, use_cache=False)
        sent = model.cost().cost.sent
    assert len({count for (a, b), count in sent.items() if CLIENT not in (a, b)}) == 1
    assert len({count for (a, b), count in sent.items() if CLIENT in (a, b)}) == 2  # to the client, from the client


@pytest.mark.full
def test_generation_keeps_every_row_in_its_parallel_session(plaintext: PreTrainedModel, two: PreTrainedModel) -> None:
    how = {"max_new_tokens": 3, "pad_token_id": 0}
    assert torch.equal(two.generate(IDS, do_sample=False, **how), plaintext.generate(IDS, do_sample=False, **how))
    batch = {"input_ids": PADDED, "attention_mask": (PADDED != 0).long()}
    assert torch.equal(two.generate(**batch, do_sample=False, **how), plaintext.generate(**batch, **how))
    assert torch.equal(two.generate(IDS[:1], do_sample=False, **how), plaintext.generate(IDS[:1], **how))


@pytest.mark.full
def test_beams_of_a_prompt_share_a_parallel_session(plaintext: PreTrainedModel, two: PreTrainedModel) -> None:
    how = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    for rows in (IDS, IDS[:3]):
        assert torch.equal(two.generate(rows, **how), plaintext.generate(rows, **how))


@pytest.mark.full
def test_an_encoder_output_stays_where_it_was_made() -> None:
    plain = tiny.build("t5")
    how = {"max_new_tokens": 3, "do_sample": False}
    with patch(plain, replace(TRIO, parallel_sessions=2)) as model:
        assert torch.equal(model.generate(IDS, **how), plain.generate(IDS, **how))
        assert torch.equal(model.generate(IDS, num_beams=2, **how), plain.generate(IDS, num_beams=2, **how))


@pytest.mark.full
def test_a_row_cannot_change_its_parallel_session(two: PreTrainedModel) -> None:
    cache = two(IDS, use_cache=True).past_key_values
    with pytest.raises(UnsupportedOp, match="would move to another parallel session"):
        cache.reorder_cache(torch.tensor([2, 1, 0, 3]))
    cache.reorder_cache(torch.tensor([1, 0, 3, 3]))
    two(IDS[:, :1], past_key_values=cache)
    cache.reset()
    with pytest.raises(DomainError, match="rows"):
        two(IDS[:3, :1], past_key_values=two(IDS, use_cache=True).past_key_values)
    two(IDS[:3], past_key_values=cache)


def parties_of(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], party.Party]:
    """Every parallel session of every party that loads a model from now on, by parallel session and party."""
    found: dict[tuple[int, int], party.Party] = {}
    original = party.Party._load

    def load(self: party.Party, message: dict[str, object]) -> None:
        parallel_session = next(
            parallel_session for parallel_session, other in self.parallel_sessions.items() if other is self
        )
        found[parallel_session, self.number] = self
        original(self, message)

    monkeypatch.setattr(party.Party, "_load", load)
    return found


def weight(member: party.Party, path: str = "fc1") -> tuple[torch.Tensor, ...]:
    return member.ready().model.get_submodule(f"model.decoder.layers.0.{path}").weight.to_fixed().share.parts


def test_parallel_sessions_of_one_role_assignment_hold_one_share_others_have_masks_of_their_own(
    plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parties_of(monkeypatch)
    with patch(plaintext, replace(TRIO, parallel_sessions=2)):
        for number in range(3):
            for path in ("fc1", "self_attn.k_proj"):  # the latter was joined with its siblings for one product
                pairs = zip(weight(found[0, number], path), weight(found[1, number], path), strict=True)
                assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    with patch(plaintext, replace(TRIO, parallel_sessions=2, rotate_roles=True)):
        held = [part for place in PLACES for part in weight(found[place])]
        assert [found[place].role for place in PLACES] == [0, 1, 2, 2, 0, 1]
        for number in range(3):
            # what one party holds in both parallel sessions never adds up to the weight, nor to another of its parts
            mine = [*weight(found[0, number]), *weight(found[1, number])]
            assert all(not torch.equal(a, b) for i, a in enumerate(mine) for b in mine[:i])
        distinct = {tuple(part.reshape(-1)[:4].tolist()) for part in held}
        assert len(distinct) == 2 * 4  # in each parallel session two masks and two masked values


def test_a_party_takes_no_shares_of_another_role(plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client commands: in one sharing a party with two roles would hold what two may not hold together."""
    found, rotated = parties_of(monkeypatch), replace(TRIO, parallel_sessions=4, rotate_roles=True)
    with patch(plaintext, rotated):
        member = found[1, 2]
        member.share_file = object()  # type: ignore[assignment]
        with pytest.raises(TransportError, match=r"a share file was shared for the roles \(0, 1, 2\), .* \(2, 0, 1\)"):
            member._load(LoadFile())
        with pytest.raises(TransportError, match="the model of parallel session 0 was shared for the roles"):
            member._load(LoadLike(0))
        again = found[3, 0]
        assert (again.role, again.assignment) == (0, (0, 2, 1))
        with pytest.raises(TransportError, match="the model of parallel session 0 was shared for the roles"):
            again._load(LoadLike(0))  # the same role, and masks that were dealt to others
    monkeypatch.setattr(client_sessions, "assignment", lambda parties, number, rotate: (0, 1, 2))
    with pytest.raises(TransportError, match=r"party \d: the model of parallel session 0 was shared for the roles"):
        patch(plaintext, rotated)
    with patch(plaintext, replace(rotated, weights="public")) as model:  # every role has the same weights
        assert worst(model(IDS).logits, plaintext(IDS).logits) < LOGIT_ERROR


def test_each_parallel_session_has_keys_of_its_own(plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parties_of(monkeypatch)
    with patch(plaintext, replace(TRIO, parallel_sessions=2)):
        drawn = {tuple(found[parallel_session, 0].session.protocol._draw(4).tolist()) for parallel_session in range(2)}
        assert len(drawn) == 2


def test_a_failure_in_one_parallel_session_ends_all(
    plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = party.Party.forward

    def forward(self: party.Party, message: dict[str, object]) -> None:
        if self.number == 2 and self.parallel_sessions[1] is self:
            raise DomainError("something outside the domain")
        original(self, message)

    monkeypatch.setattr(party.Party, "forward", forward)
    model = patch(plaintext, replace(TRIO, parallel_sessions=2))
    with pytest.raises(DomainError, match="party 2: something outside the domain"):
        model(IDS)
    with pytest.raises(PartyFailed, match="this session is over"):
        model(IDS)


def test_requests_of_several_threads_run_in_parallel_sessions_of_their_own(
    plaintext: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls that each wait for the others to have begun: one after the other they would never end."""
    meeting = threading.Barrier(3, timeout=30)
    original = party.Party.forward

    def forward(self: party.Party, message: dict[str, object]) -> None:
        if self.number == 0:
            meeting.wait()
        original(self, message)

    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with (
        patch(plaintext, replace(TRIO, parallel_sessions=3, rotate_roles=True)) as model,
        ThreadPoolExecutor(3) as pool,
    ):
        monkeypatch.setattr(party.Party, "forward", forward)
        made = list(pool.map(lambda row: model.generate(IDS[row : row + 1], **how), range(3)))
    for row in range(3):
        assert torch.equal(made[row], plaintext.generate(IDS[row : row + 1], **how))


@pytest.mark.parametrize(("protocol", "rotate_roles"), [("quad", True), ("dealer", False)])
def test_other_protocols_share_rows_too(plaintext: PreTrainedModel, protocol: str, rotate_roles: bool) -> None:
    with patch(plaintext, replace(TRIO, protocol=protocol, parallel_sessions=2, rotate_roles=rotate_roles)) as model:
        assert worst(model(IDS).logits, plaintext(IDS).logits) < LOGIT_ERROR


def test_images_share_rows_too() -> None:
    from train_cnn import small_lenet

    torch.manual_seed(3)
    network, images = small_lenet().eval(), torch.randn(5, 1, 8, 8)
    with patch(network, replace(TRIO, parallel_sessions=2, rotate_roles=True)) as model:
        assert worst(model(images), network(images)) < LOGIT_ERROR


@pytest.mark.full
def test_processes_answer_alike(plaintext: PreTrainedModel) -> None:
    with patch(plaintext, replace(TRIO, parallel_sessions=3, rotate_roles=True, party_mode="processes")) as model:
        assert worst(model(IDS).logits, plaintext(IDS).logits) < LOGIT_ERROR


def test_public_weights_come_once(plaintext: PreTrainedModel) -> None:
    with patch(plaintext, replace(TRIO, parallel_sessions=3, rotate_roles=True, weights="public")) as model:
        assert worst(model(IDS).logits, plaintext(IDS).logits) < LOGIT_ERROR
