"""FlashAttention for prefills: what it is asked for, against modules that have its entries and compute with torch.

The signatures are those of FlashAttention 3's ``flash_attn_with_kvcache`` (hopper/flash_attn_interface.py) and of
flash-attn-4's ``flash_attn_varlen_func`` (flash_attn/cute/interface.py, 4.0.0b36). What a card does is not shown.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from paged_cases import batch_of, definition

from quire.gpu_worker import main, warmup
from quire.gpu_worker.kernels import attention, attention_flash, attention_tiles
from quire.gpu_worker.kernels.attention import LayerShape, Scores
from quire.gpu_worker.kernels.attention_flash import choose_flash
from quire.gpu_worker.kernels.card import INTERPRETER, KIB, Card
from quire.gpu_worker.parallel.parallel import Group
from quire.proto.config import ConfigError, EngineArgs

HOPPER = Card("H100", "cuda", 90, 132, 227 * KIB, 228 * KIB)
BLACKWELL = Card("B200", "cuda", 100, 148, 227 * KIB, 228 * KIB)
LENS = [(1, 20), (1, 70), (40, 40), (9, 30), (25, 100)]

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the modules here compute on a CPU")


def attend(q, k_cache, v_cache, starts, lengths, table, scale, window, softcap):
    """Causal attention of q [T, heads, dim] over pages; ``window`` is (keys before, keys behind) or of -1 or None."""
    assert starts[0] == 0 and starts[-1] == len(q) and table.dtype == starts.dtype == lengths.dtype == torch.int32
    assert table.stride(-1) == 1 and len(table) == len(lengths) == len(starts) - 1
    lens = [(end - start, int(n)) for start, end, n in zip(starts, starts[1:], lengths, strict=False)]
    rows = []
    for (_, context), pages in zip(lens, table, strict=True):
        used = pages[: -(-context // k_cache.shape[1])].long()
        rows.append([c[used].flatten(0, 1)[:context].float() for c in (k_cache, v_cache)])
    seen = None if window[0] in (-1, None) else window[0] + 1
    return definition(q.float(), [(int(n), c) for n, c in lens], rows, scale, seen, softcap).to(q.dtype)


def fa3(calls):
    """``flash_attn_interface``, which gives one tensor."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        calls.append("FA3")
        assert causal and max_seqlen_q == 40
        return attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fa4(calls):
    """``flash_attn.cute``, which gives the result and log sums that it may leave out."""

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
        causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        return_lse=False,
    ):  # fmt: skip
        calls.append("FA4")
        assert causal and cu_seqlens_k is None and max_seqlen_q == 40 and max_seqlen_k == 100 and not softcap
        return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window_size, softcap), None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


@pytest.fixture
def installed(monkeypatch):
    """Make modules importable; the list of their calls. Nothing is chosen afterwards."""
    calls = []

    def install(*makers):
        for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)
        for maker in makers:
            module = maker(calls)
            if "." in module.__name__:
                monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    yield install
    attention_flash.use_flash(None)


def case(dtype=torch.bfloat16, dim=16):
    """q, caches of shuffled pages, and the batch; keys and values of each row."""
    generator = torch.Generator().manual_seed(1)
    pages = [-(-context // 16) for _, context in LENS]
    order, tables, at = torch.randperm(sum(pages), generator=generator).tolist(), [], 0
    for count in pages:
        tables.append(order[at : at + count])
        at += count
    k, v = torch.randn(2, len(order), 2, 16, dim, generator=generator).to(dtype).transpose(2, 3).unbind(0)
    batch = batch_of(LENS, tables, 16)
    return torch.randn(sum(n for n, _ in LENS), 4, dim, generator=generator).to(dtype), k, v, batch


@pytest.mark.parametrize("maker", [fa3, fa4])
@pytest.mark.parametrize("options", [{}, {"window": 8}], ids=["plain", "window"])
def test_prefills_go_through_the_library_and_decodes_do_not(maker, options, installed):
    calls = installed(maker)
    attention_flash.use_flash(choose_flash("flash", HOPPER))
    q, k, v, batch = case()
    got = attention.paged_attention(q, k, v, batch, Scores(0.3, **options))
    want = attention.paged_attention_torch(q, k, v, batch, Scores(0.3, **options))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert len(calls) == 1
    decodes = batch_of(LENS[:2], [row.tolist() for row in batch.block_tables[:2]], 16)
    attention.paged_attention(q[:2], k, v, decodes, Scores(0.3))
    assert len(calls) == 1
    attention.paged_attention(q, k, v, batch, Scores(0.3, **options))  # the next layer of the step
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slopes": torch.ones(4)}, "ALiBi slopes"),
        ({"sinks": torch.ones(4)}, "attention sinks"),
        ({"softcap": 5.0}, "a soft cap"),
    ],
)
def test_what_the_library_lacks_is_tritons_and_said_once(options, why, installed, caplog):
    caplog.set_level("INFO")
    calls = installed(fa4)
    attention_flash.use_flash(choose_flash("flash", HOPPER))
    for _ in range(2):
        q, k, v, batch = case()
        got = attention.paged_attention(q, k, v, batch, Scores(0.3, **options))
        want = attention.paged_attention_torch(q, k, v, batch, Scores(0.3, **options))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert not calls
    assert [record.getMessage() for record in caplog.records] == [
        f"layers with {why} are not for FlashAttention 4: Triton's kernel computes their prefills"
    ]


def test_flash_attention_3_has_soft_caps(installed):
    calls = installed(fa3)
    attention_flash.use_flash(choose_flash("flash", HOPPER))
    q, k, v, batch = case()
    got = attention.paged_attention(q, k, v, batch, Scores(0.3, softcap=5.0))
    want = attention.paged_attention_torch(q, k, v, batch, Scores(0.3, softcap=5.0))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert calls == ["FA3"]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 12), (torch.bfloat16, 512)])
def test_types_and_heads_it_is_not_made_for(dtype, dim, installed):
    installed(fa3)
    assert not choose_flash("flash", HOPPER).takes(torch.empty(1, 1, dim, dtype=dtype), Scores(1.0))


@pytest.mark.parametrize(("card", "largest"), [(HOPPER, 256), (BLACKWELL, 128)], ids=["H100", "B200"])
def test_the_largest_head_is_the_cards(card, largest, installed, caplog):
    """FlashAttention 4 refuses heads of 192 dims on a B200, and those of 256 with pages of 16 tokens."""
    caplog.set_level("INFO")
    installed(fa4)
    flash = choose_flash("flash", card)
    for dim in (8, 64, 128, 192, 256, 264):
        assert flash.takes(torch.empty(1, 1, dim, dtype=torch.bfloat16), Scores(1.0)) == (dim <= largest)
    assert ("layers with heads of 192 dims are not for" in caplog.text) == (largest == 128)


def fails(error):
    """``flash_attn.cute`` of an installation that raises ``error``."""

    def make(calls):
        def flash_attn_varlen_func(*given, **named):
            raise error

        module = ModuleType("flash_attn.cute")
        module.flash_attn_varlen_func = flash_attn_varlen_func
        return module

    return make


def test_a_library_that_fails_before_ready_is_one_line(installed):
    installed(fails(AssertionError("page_size 16\nis not supported")))
    flash = choose_flash("flash", BLACKWELL)
    attention_flash.use_flash(flash)
    q, k, v, batch = case()
    with pytest.raises(ConfigError) as refusal:
        attention.paged_attention(q, k, v, batch, Scores(0.3))
    assert str(refusal.value) == (
        "attention_backend=flash: FlashAttention 4 fails on this card (AssertionError: page_size 16); use "
        "--attention-backend=triton."
    )
    flash.warm = True
    with pytest.raises(AssertionError):  # a step that fails is no reason to stay down
        attention.paged_attention(q, k, v, batch, Scores(0.3))


def test_memory_that_runs_out_within_the_library_is_told_as_such(installed):
    installed(fails(torch.OutOfMemoryError("CUDA out of memory")))
    attention_flash.use_flash(choose_flash("flash", BLACKWELL))
    with pytest.raises(torch.OutOfMemoryError):
        attention.paged_attention(*case(), Scores(0.3))


def test_the_warm_up_has_the_library_compile_all_that_it_will(installed, monkeypatch):
    """FlashAttention 4 compiles another kernel for more than 128 rows (tokens x heads of a group) on a B200, where
    Triton's tiles change no more."""
    called = []

    def flash_attn_varlen_func(q, k, v, **named):
        called.append(named["max_seqlen_q"])
        return torch.zeros_like(q), None

    def fake(calls):
        module = ModuleType("flash_attn.cute")
        module.flash_attn_varlen_func = flash_attn_varlen_func
        return module

    installed(fake)
    monkeypatch.setattr(attention_tiles, "card_of", lambda device: BLACKWELL)
    flash = choose_flash("flash", BLACKWELL)
    attention_flash.use_flash(flash)
    cpu, group = torch.device("cpu"), 2

    class Model:
        def choosers(self):
            return {LayerShape(2 * group, 2, 16, None, torch.bfloat16, cpu)}

        def forward(self, batch, kv, before):
            q = torch.zeros(len(batch.token_ids), 2 * group, 16, dtype=torch.bfloat16)
            if batch.num_decodes == 0:  # the others take the interpreter long
                attention.paged_attention(q, *torch.zeros(2, 1, 16, 2, 16).to(q.dtype), batch, Scores(1.0))
            return q

    state = SimpleNamespace(max_rows=2, max_model_len=300, device=cpu, block_size=16)
    pooler = SimpleNamespace(config=SimpleNamespace(convert="embed"))  # of which no logits are made
    runner = SimpleNamespace(
        model=Model(), state=state, max_tokens=300, group=Group(), kv=None, pooler=pooler, slots=None, beside=[]
    )
    warmup.warm_up(runner, progress=False)
    assert {length * group > 128 for length in called} == {False, True}
    assert flash.warm


def test_which_library_is_taken(installed):
    installed(fa3, fa4)
    assert choose_flash("flash", HOPPER).library.name == "FlashAttention 3"
    assert choose_flash("flash", BLACKWELL).library.name == "FlashAttention 4"
    installed(fa4)
    assert choose_flash("flash", HOPPER).library.name == "FlashAttention 4"
    for backend in ("auto", "triton"):
        assert choose_flash(backend, HOPPER) is None


@pytest.mark.parametrize("makers", [[], [fa3]], ids=["nothing", "another card's"])
def test_without_the_package_the_remedy_is_said(makers, installed):
    installed(*makers)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[flash\]'") as refusal:
        choose_flash("flash", BLACKWELL)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        (Card("RTX 4090", "cuda", 89, 128, 99 * KIB, 100 * KIB), "RTX 4090"),
        (Card("MI300X", "hip", "gfx942", 304, 64 * KIB, 64 * KIB), "MI300X"),
        (INTERPRETER, "a CPU"),
    ],
)
def test_on_other_cards_the_card_is_named(card, name, installed, monkeypatch):
    installed(fa3, fa4)
    monkeypatch.setattr("quire.gpu_worker.kernels.card.card_of", lambda device: card)
    with pytest.raises(ConfigError, match=f"this is {name}; use --attention-backend=triton"):
        main._suit(EngineArgs(model="m", attention_backend="flash").check(), torch.device("cpu"))
    main._suit(EngineArgs(model="m").check(), torch.device("cpu"))


def test_batch_invariance_is_refused():
    """The library would be loaded and never called."""
    with pytest.raises(ConfigError, match=r"flash cannot be batch_invariant.*leave --batch-invariant out") as refusal:
        EngineArgs(model="m", attention_backend="flash", batch_invariant=True).check()
    assert "\n" not in str(refusal.value)
    EngineArgs(model="m", batch_invariant=True).check()


def test_the_extra_names_the_package():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(one.startswith("flash-attn-4") for one in project["optional-dependencies"]["flash"])
    assert "quire[flash]" in attention_flash.REMEDY
