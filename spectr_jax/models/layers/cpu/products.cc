// Products of a few rows of activations with the weights of a layer, for decoding on a CPU, where reading the weights is
// what takes time. Each weight is read once, as it lies in the model, and multiplied with every row of the call.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Loops over the sums of a block of rows: a compiler keeps the sums in registers only where these are unrolled.
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINED __attribute__((always_inline))

namespace ffi = xla::ffi;

namespace {

struct Bfloat16 { uint16_t bits; };

inline int32_t Bits(float v) { return std::bit_cast<int32_t>(v); }
inline float FromBits(int32_t bits) { return std::bit_cast<float>(bits); }
inline float AsFloat(float v) { return v; }
inline float AsFloat(Bfloat16 v) { return FromBits(static_cast<int32_t>(static_cast<uint32_t>(v.bits) << 16)); }

// A weight of attention as it enters the product with values.
template <typename Row>
inline float Narrowed(float v) { return v; }
template <>
inline float Narrowed<Bfloat16>(float v) {
  const uint32_t bits = static_cast<uint32_t>(Bits(v));
  return FromBits(static_cast<int32_t>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000));
}

constexpr float kUnits = 32767;   // Activations are rounded to this many units on either side of zero.
constexpr float kTiny = 1e-30f;   // The largest activation of a row counts as at least this.
constexpr long kSegment = 4096;   // Inputs; int32 lanes hold the sums of this many products of int8 and int16.
constexpr long kLine = 32;       // Of 16 bits: the cache line of most CPUs.
constexpr long kAhead = 2048;     // Bytes; a CPU's own prefetching stops at the end of each page.
constexpr long kRowsAhead = 8;    // Of weights [inputs, outputs], read ahead.
constexpr long kCachedRows = 16;  // Rows of activations that stay in a CPU's first cache.
constexpr long kQueries = 24;     // Rows of attention that read keys and values together.
constexpr long kMixedSlots = 64;  // Values of these slots stay in a CPU's first cache.
constexpr long kGroupRows = 48;   // Rows of activations that stay in a CPU's second cache.
constexpr long kLong = 1 << 15;   // Weights; fewer stay in a cache, however they are read.
constexpr long kParts = 8;        // Of the inputs of weights [inputs, outputs], which threads share out.
constexpr long kColumns = 1024;   // Outputs of four rows that stay in a CPU's first cache.

struct Int8Product {
  const int8_t* weights;   // [outputs, inputs]
  const float* scale;      // [outputs]
  const int16_t* whole;    // [rows, inputs]
  const float* row_scale;  // [rows]
  float* y;                // [rows, outputs]
  long rows, inputs, outputs;
  long whole_stride;  // From one row of `whole` to the next.
};

struct FloatProduct {
  const void* weights;  // [outputs, inputs], or [inputs, outputs] for columns
  const float* x;       // [rows, inputs]
  float* y;             // [rows, outputs]
  long rows, inputs, outputs;
  long stride;  // From one row of the weights to the next.
};

struct Attention {
  const float* queries;               // [sequences, tokens, heads, width]
  const void *keys, *values;          // [sequences, slots, kv_heads, width]
  const bool* visible;                // [sequences, tokens, slots]
  float* mixed;                       // As queries.
  long tokens, slots, heads, kv_heads, width;
};

struct Norm {
  const float *x, *scale, *bias;  // [rows, width], [width], [width]
  float* y;                       // As x.
  long width;
  float epsilon;
  bool centered;
};

struct Kernels {
  void (*normalize)(const Norm&, long, long);
  float (*round)(const float*, long, int16_t*);
  void (*int8_rows)(const Int8Product&, long, long);
  void (*float_rows)(const FloatProduct&, long, long);
  void (*bfloat16_rows)(const FloatProduct&, long, long);
  void (*float_columns)(const FloatProduct&, long, long);
  void (*bfloat16_columns)(const FloatProduct&, long, long);
  void (*float_attention)(const Attention&, long, long);
  void (*bfloat16_attention)(const Attention&, long, long);
};

// Calls `part.operator()<ROWS>(first row)` for all rows, in blocks of at most MOST.
template <int MOST, typename Part>
inline void InBlocks(long rows, const Part& part, long row = 0) {
  for (; row + MOST <= rows; row += MOST) part.template operator()<MOST>(row);
  if constexpr (MOST > 1) {
    if (row < rows) InBlocks<MOST - 1>(rows, part, row);
  }
}

namespace any_cpu {
#define LEVEL 0
#include "lanes.h"
#undef LEVEL
}  // namespace any_cpu

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define LEVEL 2
#include "lanes.h"
#undef LEVEL
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
namespace avx512 {
#define LEVEL 4
#include "lanes.h"
#undef LEVEL
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// The levels that this CPU supports, from the plainest up.
std::vector<Kernels> Levels() {
  std::vector<Kernels> levels = {any_cpu::kKernels};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) levels.push_back(avx2::kKernels);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    levels.push_back(avx512::kKernels);
  }
#endif
  return levels;
}

const std::vector<Kernels> kLevels = Levels();
std::atomic<int> chosen_level = static_cast<int>(kLevels.size()) - 1;

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Divides [0, count) of `work` multiplications each among threads of the pool; the calling thread does what no other has begun.
template <typename Part>
void InParallel(ffi::ThreadPool& pool, long count, long work, const Part& part) {
  constexpr long kLeast = 1 << 15;  // Multiplications that are worth another thread.
  const long threads = std::clamp<long>(count * work / kLeast, 1, std::max<long>(1, pool.num_threads()));
  if (count == 0) return;
  const long share = (count + threads - 1) / threads;
  const long shares = (count + share - 1) / share;
  if (shares == 1) return part(0, count);
  struct Progress {
    std::atomic<long> begun{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // Late threads read it after this call is over.
  auto share_out = [progress, shares, share, count, &part] {
    for (long i; (i = progress->begun.fetch_add(1)) < shares;) {
      part(i * share, std::min(count, (i + 1) * share));
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (long i = 1; i < shares; ++i) pool.Schedule([share_out] { share_out(); });
  share_out();
  for (long turn = 0; progress->done.load(std::memory_order_acquire) < shares; ++turn) {
    turn < 10000 ? Pause() : std::this_thread::yield();
  }
}

bool IsFloat(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == ffi::F32 || buffer.element_type() == ffi::BF16;
}

ffi::Error Unless(bool fits) {
  return fits ? ffi::Error::Success() : ffi::Error::InvalidArgument("operands whose shapes or dtypes do not fit together");
}

ffi::Error Int8Rows(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::S8> weights,
                    ffi::BufferR1<ffi::F32> scale, ffi::ResultBufferR2<ffi::F32> y) {
  const Kernels& kernels = kLevels[chosen_level];
  const long rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = weights.dimensions()[0];
  const auto error = Unless(weights.dimensions()[1] == inputs && scale.dimensions()[0] == outputs);
  if (error.failure()) return error;
  // Rows begin at cache lines.
  const long stride = (inputs + kLine - 1) / kLine * kLine;
  std::vector<int16_t> storage(rows * stride + kLine);
  int16_t* whole = storage.data() + (-reinterpret_cast<uintptr_t>(storage.data()) / sizeof(int16_t)) % kLine;
  std::vector<float> row_scale(rows);
  for (long r = 0; r < rows; ++r) {
    row_scale[r] = kernels.round(x.typed_data() + r * inputs, inputs, whole + r * stride);
  }
  const Int8Product p{weights.typed_data(), scale.typed_data(), whole,   row_scale.data(), y->typed_data(),
                      rows,                 inputs,             outputs, stride};
  InParallel(pool, outputs, rows * inputs, [&](long begin, long end) { kernels.int8_rows(p, begin, end); });
  return ffi::Error::Success();
}

// A product with weights [inputs, outputs] in kParts parts of the inputs, so that each thread reads one long piece of memory.
// The sums of the parts are added in order, whatever the number of threads.
void InParts(ffi::ThreadPool& pool, const FloatProduct& p, long bytes, void (*kernel)(const FloatProduct&, long, long)) {
  const auto start = [&p](long part) { return part == kParts ? p.inputs : p.inputs * part / kParts / 4 * 4; };
  const long size = p.rows * p.outputs;
  const auto sums = std::make_unique_for_overwrite<float[]>((kParts - 1) * size);
  InParallel(pool, kParts, size * p.inputs / kParts, [&](long begin, long end) {
    for (long part = begin; part < end; ++part) {
      const long from = start(part), inputs = start(part + 1) - from;
      std::vector<float> x(p.rows * inputs);
      for (long r = 0; r < p.rows; ++r) std::copy_n(p.x + r * p.inputs + from, inputs, x.data() + r * inputs);
      const void* weights = static_cast<const char*>(p.weights) + from * p.stride * bytes;
      float* y = part == 0 ? p.y : sums.get() + (part - 1) * size;
      kernel({weights, x.data(), y, p.rows, inputs, p.outputs, p.stride}, 0, p.outputs);
    }
  });
  for (long part = 1; part < kParts; ++part) {
    for (long i = 0; i < size; ++i) p.y[i] += sums[(part - 1) * size + i];
  }
}

// A product with float weights, whose axis `contracted` is that of the inputs.
ffi::Error Product(ffi::ThreadPool& pool, const ffi::BufferR2<ffi::F32>& x, const ffi::AnyBuffer& weights, int contracted,
                   ffi::ResultBufferR2<ffi::F32>& y, void (*floats)(const FloatProduct&, long, long),
                   void (*bfloat16s)(const FloatProduct&, long, long)) {
  const long rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const auto shape = weights.dimensions();
  const auto error = Unless(IsFloat(weights) && shape.size() == 2 && shape[contracted] == inputs);
  if (error.failure()) return error;
  const auto kernel = weights.element_type() == ffi::F32 ? floats : bfloat16s;
  const long outputs = shape[1 - contracted];
  const FloatProduct p{weights.untyped_data(), x.typed_data(), y->typed_data(), rows, inputs, outputs, shape[1]};
  if (contracted == 0 && inputs * outputs >= kLong) {
    InParts(pool, p, weights.element_type() == ffi::F32 ? 4 : 2, kernel);
  } else {
    InParallel(pool, outputs, rows * inputs, [&](long begin, long end) { kernel(p, begin, end); });
  }
  return ffi::Error::Success();
}

ffi::Error FloatRows(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer weights, ffi::ResultBufferR2<ffi::F32> y) {
  const Kernels& kernels = kLevels[chosen_level];
  return Product(pool, x, weights, 1, y, kernels.float_rows, kernels.bfloat16_rows);
}

ffi::Error FloatColumns(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer weights,
                        ffi::ResultBufferR2<ffi::F32> y) {
  const Kernels& kernels = kLevels[chosen_level];
  return Product(pool, x, weights, 0, y, kernels.float_columns, kernels.bfloat16_columns);
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::BufferR3<ffi::PRED> visible, ffi::ResultBufferR4<ffi::F32> mixed) {
  const auto q = queries.dimensions(), k = keys.dimensions(), v = values.dimensions(), mask = visible.dimensions();
  const auto error = Unless(IsFloat(keys) && keys.element_type() == values.element_type() && k.size() == 4 && v.size() == 4 &&
                            std::equal(k.begin(), k.end(), v.begin()) && q[0] == k[0] && q[3] == k[3] && k[2] > 0 &&
                            q[2] % k[2] == 0 && mask[0] == q[0] && mask[1] == q[1] && mask[2] == k[1]);
  if (error.failure()) return error;
  const Attention a{queries.typed_data(), keys.untyped_data(), values.untyped_data(), visible.typed_data(), mixed->typed_data(),
                    q[1], k[1], q[2], k[2], q[3]};
  const Kernels& kernels = kLevels[chosen_level];
  const auto kernel = keys.element_type() == ffi::F32 ? kernels.float_attention : kernels.bfloat16_attention;
  InParallel(pool, q[0] * q[1] * q[2], 2 * k[1] * q[3], [&](long begin, long end) { kernel(a, begin, end); });
  return ffi::Error::Success();
}

ffi::Error Normalize(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR1<ffi::F32> scale, ffi::BufferR1<ffi::F32> bias,
                     float epsilon, bool centered, ffi::ResultBufferR2<ffi::F32> y) {
  const long rows = x.dimensions()[0], width = x.dimensions()[1];
  const auto error = Unless(scale.dimensions()[0] == width && bias.dimensions()[0] == width);
  if (error.failure()) return error;
  const Norm n{x.typed_data(), scale.typed_data(), bias.typed_data(), y->typed_data(), width, epsilon, centered};
  const auto kernel = kLevels[chosen_level].normalize;
  InParallel(pool, rows, 4 * width, [&](long begin, long end) { kernel(n, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

// The number of levels that this CPU has; kernels of the last are used unless tests choose another.
extern "C" int spectr_jax_levels() { return static_cast<int>(kLevels.size()); }
extern "C" void spectr_jax_choose_level(int level) { chosen_level = level; }

// The digest of the sources, from setup.py. Python searches the library's bytes for it before it loads the library.
extern "C" const char* spectr_jax_sources() { return SPECTR_JAX_SOURCES; }

using Matrix = ffi::BufferR2<ffi::F32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spectr_jax_int8_rows, Int8Rows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::BufferR2<ffi::S8>>().Arg<ffi::BufferR1<ffi::F32>>().Ret<Matrix>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_jax_float_rows, FloatRows,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::AnyBuffer>().Ret<Matrix>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_jax_float_columns, FloatColumns,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::AnyBuffer>().Ret<Matrix>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_jax_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::PRED>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_jax_norm, Normalize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centered")
                                  .Ret<Matrix>());
