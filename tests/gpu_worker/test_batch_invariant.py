"""``--batch-invariant`` through whole models: a token's logits have the same bits as a decode and in a chunk of a
prompt, alone and beside others. So what is computed again after a loss goes on with the same tokens, in bfloat16 too.

On a machine without a GPU Triton's interpreter runs the kernels that a GPU would run.
"""

import pytest
import tiny_models
import tiny_moe
import torch
from kernel_device import DEVICE
from paged_runner import CPU, PagedRunner, Row
from rows_alike import rows_alike  # noqa: F401  # a fixture

pytest.importorskip("triton")

from quire.gpu_worker.kernels import company, linear
from quire.gpu_worker.kernels.linear import Tiles
from quire.gpu_worker.layers import dispatch
from quire.gpu_worker.layers.formats import cuda
from quire.gpu_worker.layers.formats.cuda import CUDA
from quire.gpu_worker.models import parts
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

MODELS = {
    "llama": (tiny_models.ROWS["llama"], torch.float32),
    "mixtral": (tiny_moe.ROWS["mixtral"], torch.bfloat16),
}
TOKENS = [(7 * n) % 90 + 3 for n in range(24)]


@pytest.fixture
def invariant(monkeypatch):
    """The kernels of a GPU, with the flag on."""
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    monkeypatch.setattr(parts, "dense", lambda weight: CUDA)
    # Small ones, so that tiny weights are several too, in parts that are summed in either way.
    monkeypatch.setattr(cuda, "invariant_tiles", lambda *sizes: Tiles(32, 64, 16, 2, 4, 2))
    monkeypatch.setattr(linear, "APART_ROWS", 4)
    company.set_batch_invariant(True)
    yield
    company.set_batch_invariant(False)


class Runner(PagedRunner):
    def __init__(self, model):
        super().__init__(model)
        self.k, self.v = ([each.to(model.dtype) for each in cache] for cache in (self.k, self.v))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the loader's weights are a CPU's here")
@pytest.mark.usefixtures("invariant", "rows_alike")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_token_has_the_same_bits_however_it_is_computed(name, tmp_path):
    (kind, values, *_), dtype = MODELS[name]
    folder = tiny_models.write(kind, tmp_path, 3, {**values, "num_hidden_layers": 2})
    model = load_model(load_model_config(str(folder), None), dtype, CPU)
    runner, row, other = Runner(model), Row(TOKENS), Row(TOKENS[::-1])
    # Alone: a prompt of 4, then token by token.
    alone = [runner.step([(row, 4)])[-1]]
    alone += [runner.step([(row, 1)])[0] for _ in range(2)]
    # Again, as one prompt of 6 beside another's, and a decode beside its decode.
    again = Row(TOKENS)
    prompt = runner.step([(other, 7), (again, 6)])[7:]
    assert torch.equal(torch.stack(alone), prompt[3:])
    after = runner.step([(other, 1), (again, 1)])[1], runner.step([(row, 1)])[0]
    assert torch.equal(*after) and after[0].isfinite().all() and len(after[0].unique()) > 9
