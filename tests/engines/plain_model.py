"""The smallest model that every llama.cpp of the last years reads: architecture ``llama``, F32."""

from pathlib import Path

import gguf
import numpy as np

N_VOCAB, WIDTH, N_LAYERS, N_HEADS, FF = 300, 64, 2, 4, 96
N_BYTES = 256


def write(path: Path) -> None:
    """Write it; the weights are drawn, always the same."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_keys(writer)
    random = np.random.default_rng(0)
    for name, shape in _shapes().items():
        is_norm = name.endswith("norm.weight")
        drawn = np.ones(shape) if is_norm else 0.2 * random.standard_normal(shape)
        writer.add_tensor(name, drawn.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // N_HEADS)
    n_control = N_VOCAB - N_BYTES
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_letters(), *(f"<control {n}>" for n in range(n_control))])
    writer.add_token_types([gguf.TokenType.NORMAL] * N_BYTES + [gguf.TokenType.CONTROL] * n_control)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(N_BYTES)
    writer.add_eos_token_id(N_BYTES + 1)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """A letter for every byte, as byte-level BPE has them (openai/gpt-2 ``encoder.py``)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (chr(N_BYTES + n) for n in range(N_BYTES))
    return [chr(byte) if byte in shown else next(hidden) for byte in range(N_BYTES)]


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (N_VOCAB, WIDTH),
    }
    for layer in range(N_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{part}.weight"] = (WIDTH, WIDTH)
        for part in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{part}.weight"] = (WIDTH,)
        for part in ("ffn_gate", "ffn_up"):
            shapes[f"blk.{layer}.{part}.weight"] = (FF, WIDTH)
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, FF)
    return shapes
