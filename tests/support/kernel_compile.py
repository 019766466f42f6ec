"""Compile every kernel for sm_90 (or argv's sm) on a machine without a GPU, through the wrappers that launch them.

Run as a script with TRITON_INTERPRET unset. A launch is compiled to machine code in place of being run, with the
specialisations (divisibility, ones) that a real launch would have.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.kernels import activation, attention, logprobs, masks, norm, penalties, rope, sampling
from quire.gpu_worker.sampling.sampling_state import SamplingState

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TARGET = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
ALIGNED = [["tt.divisibility", 16]]


def compile_launch(self, *args, grid=None, warmup=False, **named):
    """In place of JITFunction.run."""
    given = dict(zip(self.arg_names, args, strict=False))
    given |= {k: v for k, v in named.items() if k in self.arg_names}
    options = {k: v for k, v in named.items() if k not in self.arg_names}
    types, constants, attributes = {}, {}, {}
    for i, (name, param) in enumerate(zip(self.arg_names, self.params, strict=True)):
        value = given[name]
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + TYPES[value.dtype]
            if not value.is_floating_point():
                value.zero_()  # nothing is computed, and wrappers may read what they got as an index
            if value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                attributes[(i,)] = ALIGNED
        elif isinstance(value, int):
            types[name] = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = ALIGNED
        else:
            types[name] = "fp32"
    source = ASTSource(fn=self, signature=types, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=TARGET, options=options)
    ptx, limit = done.asm["ptx"], (227 if TARGET.arch >= 90 else 163) * 1024
    matrix = "wgmma" if "wgmma" in ptx else "mma.sync" if "mma.sync" in ptx else "-"
    print(
        f"{self.__name__:18s} grid {grid!s:16s} shared {done.metadata.shared:6d} products {matrix:8s} "
        f"async copies {ptx.count('cp.async.c')}"
    )
    if done.metadata.shared > limit:
        sys.exit(f"{self.__name__} needs {done.metadata.shared} bytes of shared memory, over {limit}")


def batch(rows, tokens, context=4096, page=16):
    """A step of decodes (rows == tokens) or of one prefill a row."""
    long, short = torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows + 1, dtype=torch.int32)
    table = torch.zeros((rows, context // page), dtype=torch.int32)
    decodes = rows if rows == tokens else 0
    return StepBatch(long, long, long, short, short[:rows], table, decodes, tokens // rows, context, page)


def attend(heads, kv_heads, dim, rows, tokens, dtype=torch.bfloat16, **options):
    """One launch of attention as an H100 (or A100) would get it."""
    cache = torch.empty(2, kv_heads, 16, dim, dtype=dtype).transpose(1, 2)
    q, scores = torch.empty(tokens, heads, dim, dtype=dtype), attention.Scores(0.1, **options)
    attention.paged_attention(q, cache, cache, batch(rows, tokens), scores)


def edit_and_look(logits, params, positions, thresholds):
    """The sampler's other stages."""
    ints = torch.zeros((4, 151_936), dtype=torch.int32)
    masks.mask_bits(logits, ints[:, :4748])
    masks.mask_bits(logits, ints[:, :4748].contiguous(), positions, params)
    masks.ban_words(logits, masks.Words(ints[0], ints[1], ints[2], ints[3]), ints, positions, positions, params)
    penalties.penalise(logits, ints, positions, params)
    for source in (logprobs.Source(logits, positions), logprobs.Source(logits, positions, params, thresholds)):
        logprobs.stats(source, positions)
        logprobs._keys(source)


def main():
    """Every kernel once or more."""
    JITFunction.run = compile_launch
    attention._processors = lambda device: 132
    attention._shared_memory = lambda device: ((227 if TARGET.arch >= 90 else 163) - 8) * 1024
    attend(32, 8, 128, 8, 8)
    attend(32, 8, 128, 4, 2048)
    attend(14, 2, 64, 4, 512, torch.float16, window=100, softcap=30.0)
    attend(8, 1, 256, 2, 128)
    attend(32, 32, 80, 300, 300)
    attend(4, 2, 64, 2, 64, torch.float32)
    heads = torch.empty(64)
    attend(64, 8, 64, 8, 8, slopes=heads, sinks=heads)
    attend(64, 8, 64, 4, 2048, window=128, slopes=heads, sinks=heads)
    logits, state = torch.empty(4, 151_936), SamplingState(4, 151_936)
    positions = torch.zeros(4, dtype=torch.int64)
    thresholds = sampling.threshold(logits, state.packed, True, True, True)
    sampling.draw(logits, state.packed, positions, thresholds)
    edit_and_look(logits, state.packed, positions, thresholds)
    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    norm.rms_norm(x, x[0], 1e-5, x)
    norm.rms_norm(x.view(8, 32, 128)[:, :4], x[0, :128], 1e-5, plus_one=True)
    norm.layer_norm(x, x[0], x[1], 1e-5, x)
    norm.layer_norm(x.view(8, 32, 128)[:, :4], x[:4, :128].contiguous(), None, 1e-5)
    for kind in ("silu", "gelu", "gelu_tanh", "swiglu_oai"):
        activation.gated_activation(x, kind)
    for kind in ("relu", "relu2", "quick_gelu"):
        activation.activation(x, kind)
    q, k, v = torch.empty(8, 48, 128, dtype=torch.bfloat16).split([32, 8, 8], dim=1)
    cache, table = torch.empty(2, 8, 16, 128, dtype=torch.bfloat16).transpose(1, 2), torch.empty(64, 64)
    rope.rope_write(q, k, v, table, table, positions, positions, cache, cache)
    rope.rope_write(q, k, v, table[:, :16], table[:, :16], positions, positions, cache, cache, interleaved=True)
    rope.rope_write(q, k, v, None, None, positions, positions, cache, cache)


if __name__ == "__main__":
    main()
