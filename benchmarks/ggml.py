"""llama.cpp as a competitor of benchmarks/cpu.py: ggml's products, through llama-cpp-python's libraries, and a model.

Weights are Q4_0 and lie as llama.cpp lays them: in the buffer that repacks them for this CPU, where it has one.
"""

import ctypes
import math
import tempfile
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import llama_cpp
import numpy as np

F32, Q4_0, I32 = 0, 2, 26  # ggml's numbers of its types
Q4_0_BYTES, Q4_0_GROUP = 18, 32


class Params(Structure):
    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


def libraries():
    folder = Path(llama_cpp.__file__).parent / "lib"
    names = ("libggml-base", "libggml-cpu", "libggml")
    found = [next(iter(sorted(folder.glob(f"{name}.*"))), None) for name in names]
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in found if path is not None]


LIBRARIES = libraries()


def function(name, result=c_void_p, arguments=()):
    for library in LIBRARIES:
        if hasattr(library, name):
            made = getattr(library, name)
            made.restype, made.argtypes = result, arguments
            return made
    raise OSError(f"llama-cpp-python's libraries have no {name}")


init = function("ggml_init", c_void_p, (Params,))
tensor_3d = function("ggml_new_tensor_3d", c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64))
mul_mat = function("ggml_mul_mat", c_void_p, (c_void_p,) * 3)
mul_mat_id = function("ggml_mul_mat_id", c_void_p, (c_void_p,) * 4)
swiglu = function("ggml_swiglu_split", c_void_p, (c_void_p,) * 3)
new_graph = function("ggml_new_graph", c_void_p, (c_void_p,))
expand = function("ggml_build_forward_expand", None, (c_void_p,) * 2)
allocate = function("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, (c_void_p,) * 2)
tensor_set = function("ggml_backend_tensor_set", None, (c_void_p, c_void_p, c_size_t, c_size_t))
compute = function("ggml_backend_graph_compute", c_int, (c_void_p,) * 2)
cpu_init = function("ggml_backend_cpu_init")
set_threads = function("ggml_backend_cpu_set_n_threads", None, (c_void_p, c_int))
plain_buffers = function("ggml_backend_cpu_buffer_type")
buffer_name = function("ggml_backend_buft_name", c_char_p, (c_void_p,))
device_of = function("ggml_backend_get_device", c_void_p, (c_void_p,))
registry_of = function("ggml_backend_dev_backend_reg", c_void_p, (c_void_p,))
proc_address = function("ggml_backend_reg_get_proc_address", c_void_p, (c_void_p, c_char_p))


class Ggml:
    def __init__(self, threads):
        self.threads, self.backend = threads, cpu_init()
        set_threads(self.backend, threads)
        device = device_of(self.backend)
        extra = proc_address(registry_of(device), b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(extra)(device) if extra else None
        self.weights, at = plain_buffers(), 0
        while listed and listed[at]:
            if b"REPACK" in buffer_name(listed[at]):
                self.weights = listed[at]
            at += 1

    def context(self):
        return init(Params(1 << 20, None, True))

    def matrix(self, *shape):
        """Random Q4_0 weights, repacked. Shapes are torch's, the last axis first in ggml's."""
        context, (K, N, *E) = self.context(), shape[::-1]
        made = tensor_3d(context, Q4_0, K, N, *E or (1,))
        if not allocate(context, self.weights):
            raise MemoryError("ggml has no memory for weights")
        blocks = np.random.default_rng(0).integers(0, 256, (math.prod(shape) // Q4_0_GROUP, Q4_0_BYTES), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        tensor_set(made, blocks.ctypes.data, 0, blocks.nbytes)
        return made

    def given(self, context, kind, values):
        shape = values.shape[::-1]
        made = tensor_3d(context, kind, *shape, *(1,) * (3 - len(shape)))
        return made, np.ascontiguousarray(values)

    def run(self, context, result, given):
        """What computes `result` again and again."""
        graph = new_graph(context)
        expand(graph, result)
        if not allocate(context, plain_buffers()):
            raise MemoryError("ggml has no memory for activations")
        for tensor, values in given:
            tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        return lambda: compute(self.backend, graph)

    def product(self, rows, N, K, copies):
        def one():
            context = self.context()
            x = self.given(context, F32, np.random.default_rng(1).standard_normal((rows, K), np.float32))
            return self.run(context, mul_mat(context, self.matrix(N, K), x[0]), [x])

        return [one() for _ in range(copies)]

    def experts(self, E, chosen, inner, hidden, copies):
        gate, up, down = self.matrix(E, inner, hidden), self.matrix(E, inner, hidden), self.matrix(E, hidden, inner)

        def one(seed):
            context, random = self.context(), np.random.default_rng(seed)
            ids = self.given(context, I32, random.choice(E, (1, chosen), False).astype(np.int32))
            x = self.given(context, F32, random.standard_normal((1, 1, hidden), np.float32))
            parts = [mul_mat_id(context, w, x[0], ids[0]) for w in (gate, up)]
            return self.run(context, mul_mat_id(context, down, swiglu(context, *parts), ids[0]), [ids, x])

        return [one(seed) for seed in range(copies)]


class Model:
    """A model of qwen3moe's shape with random Q4_0 weights, as llama.cpp runs it."""

    def __init__(self, shape, threads):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.gguf"
            write(path, shape)
            parameters = llama_cpp.llama_model_default_params()
            self.model = llama_cpp.llama_load_model_from_file(str(path).encode(), parameters)
            if not self.model:
                raise RuntimeError("llama.cpp did not load the model that was written for it")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = 1024, 512, 512
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_new_context_with_model(self.model, settings)

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def forward(self, ids):
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        return llama_cpp.llama_get_logits_ith(self.context, -1)[0]


def write(path, shape):
    """A GGUF of random weights. Only speed matters."""
    import gguf

    random, hidden, heads, groups, D = np.random.default_rng(0), *(shape[n] for n in ("hidden", "heads", "groups", "D"))
    to = gguf.GGUFWriter(str(path), "qwen3moe")
    to.add_block_count(shape["layers"])
    to.add_context_length(4096)
    to.add_embedding_length(hidden)
    to.add_feed_forward_length(shape["inner"])
    to.add_head_count(heads)
    to.add_head_count_kv(groups)
    to.add_key_length(D)
    to.add_value_length(D)
    to.add_layer_norm_rms_eps(1e-6)
    to.add_rope_freq_base(1e6)
    to.add_expert_count(shape["experts"])
    to.add_expert_used_count(shape["chosen"])
    to.add_expert_feed_forward_length(shape["inner"])
    to.add_vocab_size(shape["vocabulary"])
    to.add_tokenizer_model("no_vocab")
    to.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    def packed(name, *size):
        blocks = random.integers(0, 256, (*size[:-1], size[-1] // Q4_0_GROUP, Q4_0_BYTES), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.2 * size[-1] ** -0.5).tobytes(), np.uint8)
        to.add_tensor(name, blocks.reshape(*size[:-1], -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name, size):
        to.add_tensor(name, np.ones(size, np.float32))

    packed("token_embd.weight", shape["vocabulary"], hidden)
    packed("output.weight", shape["vocabulary"], hidden)
    ones("output_norm.weight", hidden)
    for layer in range(shape["layers"]):
        start = f"blk.{layer}."
        packed(start + "attn_q.weight", heads * D, hidden)
        packed(start + "attn_k.weight", groups * D, hidden)
        packed(start + "attn_v.weight", groups * D, hidden)
        packed(start + "attn_output.weight", hidden, heads * D)
        for name, size in (("attn_q_norm", D), ("attn_k_norm", D), ("attn_norm", hidden), ("ffn_norm", hidden)):
            ones(f"{start}{name}.weight", size)
        router = random.standard_normal((shape["experts"], hidden), np.float32) * np.float32(0.05)
        to.add_tensor(start + "ffn_gate_inp.weight", router)
        for name, size in (("gate", (shape["inner"], hidden)), ("up", (shape["inner"], hidden)),
                           ("down", (hidden, shape["inner"]))):  # fmt: skip
            packed(f"{start}ffn_{name}_exps.weight", shape["experts"], *size)
    to.write_header_to_file()
    to.write_kv_data_to_file()
    to.write_tensors_to_file()
    to.close()
