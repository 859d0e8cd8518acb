// The inner loops, compiled once per instruction set: products.cc includes this file in a namespace of each LEVEL,
// 0 (any CPU), 2 (AVX2) or 4 (AVX-512 with VNNI).
//
// Every sum has one order, whatever the number of rows, so the bits of a row do not depend on the other rows of a call.

#if LEVEL == 4
constexpr int kMostRows = 8;  // Their sums fit the registers.
constexpr int kMixedRows = 6, kMixedParts = 4;  // As well.
constexpr long kFewRows = 5;  // Up to here reading the weights takes the time, and one stream of them is fastest.
constexpr int kTileRows = 3, kTileOutputs = 4;  // The sums of a tile fill 24 of 32 registers.
using Floats = __m512;
constexpr long kFloats = 16;
inline Floats Load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats Load(const Bfloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void Store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats Fill(float v) { return _mm512_set1_ps(v); }
inline Floats MulAdd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats Sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats Mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // a > b ? a : b.
inline Floats Where(const bool* yes, Floats a, Floats b) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(yes));
  return _mm512_mask_mov_ps(b, _mm_test_epi8_mask(bytes, bytes), a);
}
// v times two to the power n, which is a whole number.
inline Floats Shifted(Floats v, Floats n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_cvttps_epi32(n), 23)));
}
inline float Total(Floats v) { return _mm512_reduce_add_ps(v); }
// A step of `Totals`: adds the halves of what is left of `a` and of `b`.
template <long COUNT>
inline Floats Folded(Floats a, Floats b) {
  if constexpr (COUNT == 2) return Add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  if constexpr (COUNT == 4) return Add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  if constexpr (COUNT == 8) return Add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  return Add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

using Pairs = int32_t __attribute__((vector_size(64)));  // GCC copies sums of type __m512i in every step.
using Wide = __m512i;
constexpr long kPairs = 32;
inline Pairs NoPairs() { return Pairs{}; }
inline Wide Widened(const int8_t* w) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
}
inline Pairs MulAdd(Wide w, const int16_t* x, Pairs sum) {
  return reinterpret_cast<Pairs>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), w, _mm512_loadu_si512(x)));
}
inline Floats AsFloats(Pairs sum) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(sum)); }
// Adds to `totals` the totals of four sums, each with the bits of `Total`.
inline void AddTotals(const Floats (&v)[kTileOutputs], float* totals) {
  const Floats four = Folded<4>(Folded<2>(v[0], v[1]), Folded<2>(v[2], v[3]));
  const Floats half = Add(four, _mm512_permute_ps(four, 0x4e)), all = Add(half, _mm512_permute_ps(half, 0xb1));
  const __m128 sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_set4_epi32(12, 8, 4, 0), all));
  _mm_storeu_ps(totals, _mm_add_ps(_mm_loadu_ps(totals), sums));
}

#elif LEVEL == 2
constexpr int kMostRows = 3;
constexpr int kMixedRows = 3, kMixedParts = 4;
using Floats = __m256;
constexpr long kFloats = 8;
inline Floats Load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats Load(const Bfloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline void Store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats Fill(float v) { return _mm256_set1_ps(v); }
inline Floats MulAdd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats Sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats Mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats Where(const bool* yes, Floats a, Floats b) {
  const __m256i lanes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(yes)));
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 31)));
}
inline Floats Shifted(Floats v, Floats n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_cvttps_epi32(n), 23)));
}
inline float Total(Floats v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
template <long COUNT>
inline Floats Folded(Floats a, Floats b) {
  if constexpr (COUNT == 2) return Add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  if constexpr (COUNT == 4) return Add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  return Add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

using Pairs = int32_t __attribute__((vector_size(32)));
using Wide = __m256i;
constexpr long kPairs = 16;
inline Pairs NoPairs() { return Pairs{}; }
inline Wide Widened(const int8_t* w) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}
inline Pairs MulAdd(Wide w, const int16_t* x, Pairs sum) {
  return sum + reinterpret_cast<Pairs>(_mm256_madd_epi16(w, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
inline Floats AsFloats(Pairs sum) { return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(sum)); }

#else
constexpr int kMostRows = 3;
constexpr int kMixedRows = 3, kMixedParts = 2;
constexpr long kFloats = 8;
struct Floats { float lane[kFloats]; };
template <typename Of>
inline Floats Each(Of of) {
  Floats v;
  for (long i = 0; i < kFloats; ++i) v.lane[i] = of(i);
  return v;
}
inline Floats Load(const float* p) { return Each([&](long i) { return p[i]; }); }
inline Floats Load(const Bfloat16* p) { return Each([&](long i) { return AsFloat(p[i]); }); }
inline void Store(float* p, const Floats& v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
inline Floats Fill(float v) { return Each([&](long) { return v; }); }
inline Floats MulAdd(const Floats& a, const Floats& b, const Floats& sum) {
  return Each([&](long i) { return sum.lane[i] + a.lane[i] * b.lane[i]; });
}
inline Floats Add(const Floats& a, const Floats& b) { return Each([&](long i) { return a.lane[i] + b.lane[i]; }); }
inline Floats Sub(const Floats& a, const Floats& b) { return Each([&](long i) { return a.lane[i] - b.lane[i]; }); }
inline Floats Mul(const Floats& a, const Floats& b) { return Each([&](long i) { return a.lane[i] * b.lane[i]; }); }
inline Floats Max(const Floats& a, const Floats& b) {
  return Each([&](long i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats Where(const bool* yes, const Floats& a, const Floats& b) {
  return Each([&](long i) { return yes[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats Shifted(const Floats& v, const Floats& n) {
  return Each([&](long i) { return FromBits(Bits(v.lane[i]) + (static_cast<int32_t>(n.lane[i]) << 23)); });
}
inline float Total(const Floats& v) { return std::accumulate(v.lane, v.lane + kFloats, 0.0f); }

constexpr long kPairs = 8;
struct Pairs { int32_t lane[kFloats]; };
struct Wide { int16_t lane[kFloats]; };
inline Pairs NoPairs() { return Pairs{}; }
inline Wide Widened(const int8_t* w) {
  Wide wide;
  for (long i = 0; i < kPairs; ++i) wide.lane[i] = w[i];
  return wide;
}
inline Pairs MulAdd(const Wide& w, const int16_t* x, Pairs sum) {
  for (long i = 0; i < kPairs; ++i) sum.lane[i] += int32_t{w.lane[i]} * int32_t{x[i]};
  return sum;
}
inline Floats AsFloats(const Pairs& sum) { return Each([&](long i) { return static_cast<float>(sum.lane[i]); }); }
#endif

// The sum of a function of numbers, in lanes that vectorize.
template <typename Of>
float Sum(const float* x, long count, Of of) {
  constexpr long kLanes = 32;
  float lanes[kLanes] = {};
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (long lane = 0; lane < kLanes; ++lane) lanes[lane] += of(x[i + lane]);
  }
  for (; i < count; ++i) lanes[i % kLanes] += of(x[i]);
  return std::accumulate(lanes, lanes + kLanes, 0.0f);
}

// A norm of rows [begin, end).
void Normalize(const Norm& n, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const float* x = n.x + row * n.width;
    float* y = n.y + row * n.width;
    const float count = static_cast<float>(n.width), mean = n.centered ? Sum(x, n.width, [](float v) { return v; }) / count : 0;
    const float variance = Sum(x, n.width, [mean](float v) { return (v - mean) * (v - mean); }) / count;
    const float factor = 1 / std::sqrt(variance + n.epsilon);
    for (long i = 0; i < n.width; ++i) y[i] = (x[i] - mean) * factor * n.scale[i] + n.bias[i];
  }
}

// A row of activations as int16 and the scale of their units.
float Round(const float* x, long inputs, int16_t* whole) {
  int32_t largest_bits = 0;  // Without their signs, the bits of floats have the order of the floats; NaN is above all.
  for (long i = 0; i < inputs; ++i) largest_bits = std::max(largest_bits, Bits(x[i]) & 0x7fffffff);
  const float largest = FromBits(largest_bits) < kTiny ? kTiny : FromBits(largest_bits);  // NaN stays NaN.
  const float units = kUnits / largest;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of a float: an integer conversion that vectorizes.
  for (long i = 0; i < inputs; ++i) whole[i] = static_cast<int16_t>(Bits(x[i] * units + 12582912.0f) - Bits(12582912.0f));
  return largest / kUnits;
}

template <int ROWS>
void Int8Output(const int8_t* w, const Int8Product& p, long row, long output) {
  const long inputs = p.inputs, stride = p.whole_stride;
  const int16_t* x = p.whole + row * stride;
  float total[ROWS] = {};
  for (long begin = 0; begin < inputs; begin += kSegment) {
    const long end = std::min(inputs, begin + kSegment);
    Pairs even[ROWS], odd[ROWS];
    UNROLLED for (int r = 0; r < ROWS; ++r) even[r] = odd[r] = NoPairs();
    long i = begin;
    for (; i + 2 * kPairs <= end; i += 2 * kPairs) {
      __builtin_prefetch(w + i + kAhead);
      const Wide first = Widened(w + i), second = Widened(w + i + kPairs);
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        even[r] = MulAdd(first, x + r * stride + i, even[r]);
        odd[r] = MulAdd(second, x + r * stride + i + kPairs, odd[r]);
      }
    }
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      total[r] += Total(Add(AsFloats(even[r]), AsFloats(odd[r])));
      for (long j = i; j < end; ++j) total[r] += static_cast<float>(w[j] * x[r * stride + j]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; ++r) p.y[(row + r) * p.outputs + output] = total[r] * (p.row_scale[row + r] * p.scale[output]);
}

#if LEVEL == 4
// Calls `of` for 0 to COUNT - 1, which are constants in it.
template <int COUNT, typename Of>
[[gnu::always_inline]] inline void Unroll(const Of& of) {
  [&]<int... I>(std::integer_sequence<int, I...>) { (of(I), ...); }(std::make_integer_sequence<int, COUNT>());
}

// The products of ROWS rows with kTileOutputs outputs. Meanwhile it reads ahead from `ahead`, `step` bytes further each time.
// It is not inlined, so that all registers are free for the sums.
template <int ROWS>
[[gnu::noinline]] void Int8Tile(const int8_t* w, const Int8Product& p, long row, long output, const int8_t* ahead, long step) {
  const long inputs = p.inputs, stride = p.whole_stride;
  const int16_t* x = p.whole + row * stride;
  float total[ROWS][kTileOutputs] = {};
  for (long begin = 0, end; begin < inputs; begin = end) {
    end = std::min(inputs, begin + kSegment);
    const long rest = end - (end - begin) % (2 * kPairs);
    if (long i = begin; i < rest) {
      Pairs even[kTileOutputs][ROWS], odd[kTileOutputs][ROWS];
      Unroll<kTileOutputs>([&](int o) { Unroll<ROWS>([&](int r) { even[o][r] = odd[o][r] = NoPairs(); }); });
      _Pragma("GCC unroll 3") do {  // GCC stores the sums in memory if there may be no step.
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + 64);
        Unroll<kTileOutputs>([&](int o) {
          const Wide first = Widened(w + o * inputs + i), second = Widened(w + o * inputs + i + kPairs);
          Unroll<ROWS>([&](int r) {
            even[o][r] = MulAdd(first, x + r * stride + i, even[o][r]);
            odd[o][r] = MulAdd(second, x + r * stride + i + kPairs, odd[o][r]);
          });
        });
        i += 2 * kPairs;
        ahead += step;
      } while (i < rest);
      Unroll<ROWS>([&](int r) {
        Floats sums[kTileOutputs];
        Unroll<kTileOutputs>([&](int o) { sums[o] = Add(AsFloats(even[o][r]), AsFloats(odd[o][r])); });
        AddTotals(sums, total[r]);
      });
    }
    for (long j = rest; j < end; ++j) {
      for (int r = 0; r < ROWS; ++r) {
        for (int o = 0; o < kTileOutputs; ++o) total[r][o] += static_cast<float>(w[o * inputs + j] * x[r * stride + j]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* y = p.y + (row + r) * p.outputs + output;
    for (int o = 0; o < kTileOutputs; ++o) y[o] = total[r][o] * (p.row_scale[row + r] * p.scale[output + o]);
  }
}

// Outputs [begin, end), in tiles of about equal numbers of rows. Each tile reads its share of the next outputs' weights ahead.
void Int8Tiles(const Int8Product& p, long begin, long end) {
  const long groups = (p.rows + kGroupRows - 1) / kGroupRows;
  for (long g = 0; g < groups; ++g) {
    const long from = p.rows * g / groups, rows = p.rows * (g + 1) / groups - from, tiles = (rows + kTileRows - 1) / kTileRows;
    const long step = 2 * kPairs * kTileOutputs / tiles;
    for (long o = begin; o < end; o += kTileOutputs) {
      const int8_t* w = p.weights + o * p.inputs;
      for (long t = 0; t < tiles; ++t) {
        const int8_t* ahead = w + kTileOutputs * p.inputs * (tiles + t) / tiles;
        const long first = from + rows * t / tiles, last = from + rows * (t + 1) / tiles;
        InBlocks<kTileRows>(last, [&]<int ROWS>(long row) { Int8Tile<ROWS>(w, p, row, o, ahead, step); }, first);
      }
    }
  }
}
#endif

void Int8Rows(const Int8Product& p, long begin, long end) {
#if LEVEL == 4
  if (p.rows > kFewRows) {
    const long rest = end - (end - begin) % kTileOutputs;
    Int8Tiles(p, begin, rest);
    begin = rest;
  }
#endif
  for (long from = 0; from < p.rows; from += kCachedRows) {
    const long to = std::min(p.rows, from + kCachedRows);
    for (long o = begin; o < end; ++o) {
      InBlocks<kMostRows>(to, [&]<int ROWS>(long row) { Int8Output<ROWS>(p.weights + o * p.inputs, p, row, o); }, from);
    }
  }
}

template <int ROWS, typename Weight>
void FloatOutput(const Weight* w, const FloatProduct& p, long row, long output) {
  const float* x = p.x + row * p.inputs;
  Floats sums[ROWS][4];
  for (auto& of_row : sums) std::fill_n(of_row, 4, Fill(0));
  long i = 0;
  for (; i + 4 * kFloats <= p.inputs; i += 4 * kFloats) {
    __builtin_prefetch(reinterpret_cast<const char*>(w + i) + kAhead);
    UNROLLED for (int part = 0; part < 4; ++part) {
      const Floats weight = Load(w + i + part * kFloats);
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        sums[r][part] = MulAdd(weight, Load(x + r * p.inputs + i + part * kFloats), sums[r][part]);
      }
    }
  }
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    float total = Total(Add(Add(sums[r][0], sums[r][1]), Add(sums[r][2], sums[r][3])));
    for (long j = i; j < p.inputs; ++j) total += AsFloat(w[j]) * x[r * p.inputs + j];
    p.y[(row + r) * p.outputs + output] = total;
  }
}

template <typename Weight>
void FloatRows(const FloatProduct& p, long begin, long end) {
  const Weight* weights = static_cast<const Weight*>(p.weights);
  for (long o = begin; o < end; ++o) {
    InBlocks<4>(p.rows, [&]<int ROWS>(long row) { FloatOutput<ROWS>(weights + o * p.stride, p, row, o); });
  }
}

// Adds the products of STEPS inputs to outputs [begin, end) of ROWS rows.
template <int ROWS, int STEPS, typename Weight>
void AddColumns(const Weight* w, const FloatProduct& p, long row, long input, long begin, long end) {
  float factor[ROWS][STEPS];
  UNROLLED for (int r = 0; r < ROWS; ++r) std::copy_n(p.x + (row + r) * p.inputs + input, STEPS, factor[r]);
  long o = begin;
  for (; o + kFloats <= end; o += kFloats) {
    Floats weight[STEPS];
    UNROLLED for (int s = 0; s < STEPS; ++s) {
      __builtin_prefetch(w + (input + kRowsAhead + s) * p.stride + o);
      weight[s] = Load(w + (input + s) * p.stride + o);
    }
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      float* y = p.y + (row + r) * p.outputs + o;
      Floats sum = Load(y);
      UNROLLED for (int s = 0; s < STEPS; ++s) sum = MulAdd(weight[s], Fill(factor[r][s]), sum);
      Store(y, sum);
    }
  }
  for (; o < end; ++o) {
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      float& y = p.y[(row + r) * p.outputs + o];
      UNROLLED for (int s = 0; s < STEPS; ++s) y += AsFloat(w[(input + s) * p.stride + o]) * factor[r][s];
    }
  }
}

// Weights [inputs, outputs]: every input adds its row of weights to the outputs, which stay in the cache meanwhile.
template <typename Weight>
void FloatColumns(const FloatProduct& p, long begin, long end) {
  const Weight* weights = static_cast<const Weight*>(p.weights);
  for (long from = begin; from < end; from += kColumns) {
    const long to = std::min(end, from + kColumns);
    for (long row = 0; row < p.rows; ++row) std::fill(p.y + row * p.outputs + from, p.y + row * p.outputs + to, 0.0f);
    InBlocks<4>(p.rows, [&]<int ROWS>(long row) {
      long i = 0;
      for (; i + 4 <= p.inputs; i += 4) AddColumns<ROWS, 4>(weights, p, row, i, from, to);
      for (; i < p.inputs; ++i) AddColumns<ROWS, 1>(weights, p, row, i, from, to);
    });
  }
}

// e^x for x <= 0, to 2e-7: 2^n times a polynomial (Cephes) of the rest.
inline Floats Exp(Floats x) {
  const Floats magic = Fill(12582912.0f);
  x = Max(Fill(-87.0f), x);  // NaN stays NaN.
  const Floats n = Sub(MulAdd(x, Fill(1.44269504f), magic), magic);
  const Floats rest = MulAdd(n, Fill(2.12194440e-4f), MulAdd(n, Fill(-0.693359375f), x));
  Floats power = Fill(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    power = MulAdd(power, rest, Fill(c));
  }
  return Shifted(Add(MulAdd(Mul(power, rest), rest, rest), Fill(1)), n);
}

// The totals of kFloats vectors, each summed in the order of `Total`.
template <long COUNT = kFloats, typename Of>
INLINED inline Floats Totals(const Of& of, [[maybe_unused]] long first = 0) {
#if LEVEL == 0
  return Each([&](long i) { return Total(of(i)); });
#else
  if constexpr (COUNT == 1) {
    return of(first);
  } else {  // With these steps, the totals end up in the order of the vectors.
    constexpr long step = COUNT == kFloats ? 2 : COUNT == kFloats / 2 ? 1 : 2 * COUNT;
    return Folded<COUNT>(Totals<COUNT / 2>(of, first), Totals<COUNT / 2>(of, first + step));
  }
#endif
}

// A query of attention. Sums over slots end at the last visible one, so what lies behind it does not matter.
struct Query {
  const float* x;
  const bool* visible;
  float *scores, *mixed;  // Scores become weights; whole vectors of them are written.
  long count;             // Of slots up to the last visible one.
};

// The number of slots up to the last visible one; at least one.
inline long Counted(const bool* visible, long slots) {
  for (uint64_t eight; slots > 8; slots -= 8) {
    std::memcpy(&eight, visible + slots - 8, 8);
    if (eight) break;
  }
  while (slots > 1 && !visible[slots - 1]) --slots;
  return slots;
}

inline long Padded(long count) { return (count + kFloats - 1) / kFloats * kFloats; }

// Products of a query with the keys of kFloats slots. STEPS is width / (4 * kFloats), or 0 if a compiler does not know it.
template <long STEPS>
inline void Score(const Query& query, const float* keys, long stride, long width, long slot) {
  const long steps = STEPS ? STEPS : width / (4 * kFloats);
  Store(query.scores + slot, Totals([&](long i) INLINED {
          Floats sums[4];
          UNROLLED for (int part = 0; part < 4; ++part) {
            sums[part] = Fill(0);
            UNROLLED for (long step = 0; step < steps; ++step) {
              const long at = (4 * step + part) * kFloats;
              sums[part] = MulAdd(Load(keys + i * stride + at), Load(query.x + at), sums[part]);
            }
          }
          return Add(Add(sums[0], sums[1]), Add(sums[2], sums[3]));
        }));
  for (long i = 0; i < kFloats; ++i) {
    for (long j = steps * 4 * kFloats; j < width; ++j) query.scores[slot + i] += keys[i * stride + j] * query.x[j];
  }
}

// Products of a block of queries with the keys of the slots that it counts.
template <long STEPS, typename Row>
void Score(const Query* queries, long rows, const Row* keys, long stride, long width, long most) {
  thread_local std::vector<float> copied;
  copied.resize(kFloats * width);
  for (long slot = 0; slot < most; slot += kFloats) {
    const bool copy = !std::is_same_v<Row, float> || slot + kFloats > most;  // The last slot fills a vector.
    for (long i = 0; copy && i < kFloats; ++i) {
      const Row* row = keys + std::min(slot + i, most - 1) * stride;
      for (long j = 0; j < width; ++j) copied[i * width + j] = AsFloat(row[j]);
    }
    const float* tile = copy ? copied.data() : reinterpret_cast<const float*>(keys + slot * stride);
    for (long r = 0; r < rows; ++r) {
      if (slot < queries[r].count) Score<STEPS>(queries[r], tile, copy ? width : stride, width, slot);
    }
  }
}

// Scores to e^(score - largest), and to zero for slots that are not visible.
inline void Exponents(const Query& query, float scale) {
  const long whole = query.count / kFloats * kFloats, padded = Padded(query.count);
  bool rest[kFloats] = {};
  std::copy(query.visible + whole, query.visible + query.count, rest);
  const Floats least = Fill(-std::numeric_limits<float>::max());
  Floats larger = least;
  for (long t = 0; t < padded; t += kFloats) {
    const Floats score = Max(least, Mul(Load(query.scores + t), Fill(scale)));
    const Floats seen = Where(t < whole ? query.visible + t : rest, score, least);
    Store(query.scores + t, seen);
    larger = Max(seen, larger);
  }
  float lanes[kFloats];
  Store(lanes, larger);
  const Floats largest = Fill(*std::max_element(lanes, lanes + kFloats));
  for (long t = 0; t < padded; t += kFloats) {
    const Floats power = Exp(Sub(Load(query.scores + t), largest));
    Store(query.scores + t, Where(t < whole ? query.visible + t : rest, power, Fill(0)));
  }
}

// Exponents to weights that sum to one. A total has the order of the slots; those of several queries do not wait for
// each other.
template <int ROWS, typename Row>
inline void Weigh(const Query* queries) {
  const long shared = std::min_element(queries, queries + ROWS, [](auto& a, auto& b) { return a.count < b.count; })->count;
  float total[ROWS] = {};
  for (long t = 0; t < shared; ++t) {
    UNROLLED for (int r = 0; r < ROWS; ++r) total[r] += queries[r].scores[t];
  }
  for (int r = 0; r < ROWS; ++r) {
    float* scores = queries[r].scores;
    for (long t = shared; t < queries[r].count; ++t) total[r] += scores[t];
    for (long t = 0, end = Padded(queries[r].count); t < end; ++t) scores[t] = Narrowed<Row>(scores[t] / total[r]);
  }
}

// Adds the weighted values of slots [begin, end) to PARTS vectors, from a column on, of ROWS queries.
template <int ROWS, int PARTS, typename Row>
inline void AddValues(const Query* queries, const Row* values, long stride, long column, long begin, long end) {
  Floats sums[ROWS][PARTS];
  const float* weights[ROWS];
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    weights[r] = queries[r].scores;
    UNROLLED for (int part = 0; part < PARTS; ++part) sums[r][part] = Load(queries[r].mixed + column + part * kFloats);
  }
  for (long t = begin; t < end; ++t) {
    Floats value[PARTS];
    UNROLLED for (int part = 0; part < PARTS; ++part) value[part] = Load(values + t * stride + column + part * kFloats);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const Floats weight = Fill(weights[r][t]);
      UNROLLED for (int part = 0; part < PARTS; ++part) sums[r][part] = MulAdd(value[part], weight, sums[r][part]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    UNROLLED for (int part = 0; part < PARTS; ++part) Store(queries[r].mixed + column + part * kFloats, sums[r][part]);
  }
}

template <int ROWS, typename Row>
inline void AddValues(const Query* queries, const Row* values, long stride, long width, long begin, long end) {
  long column = 0;
  for (; column + kMixedParts * kFloats <= width; column += kMixedParts * kFloats) {
    AddValues<ROWS, kMixedParts>(queries, values, stride, column, begin, end);
  }
  for (; column + kFloats <= width; column += kFloats) AddValues<ROWS, 1>(queries, values, stride, column, begin, end);
  for (; column < width; ++column) {
    for (int r = 0; r < ROWS; ++r) {
      for (long t = begin; t < end; ++t) queries[r].mixed[column] += AsFloat(values[t * stride + column]) * queries[r].scores[t];
    }
  }
}

// Adds the values of those of slots [begin, end) that each query counts.
template <int ROWS, typename Row>
inline void Mix(const Query* queries, const Row* values, long stride, long width, long begin, long end) {
  long shared = end;
  for (int r = 0; r < ROWS; ++r) shared = std::clamp(queries[r].count, begin, shared);
  AddValues<ROWS>(queries, values, stride, width, begin, shared);
  for (int r = 0; r < ROWS; ++r) AddValues<1>(queries + r, values, stride, width, shared, std::min(end, queries[r].count));
}

// Attention of rows [begin, end), in the order (sequence, key and value head, token, query head of the group).
template <typename Row>
void Attend(const Attention& a, long begin, long end) {
  thread_local std::vector<float> scores;
  const long group = a.heads / a.kv_heads, per_head = a.tokens * group, stride = a.kv_heads * a.width;
  const long room = Padded(a.slots) + 16;  // Rows that are a power of two apart compete for places in a cache.
  scores.resize(kQueries * room);
  const long steps = a.width % (4 * kFloats) ? 0 : a.width / (4 * kFloats);
  const auto score = steps == 1 ? Score<1, Row> : steps == 2 ? Score<2, Row> : steps == 4 ? Score<4, Row> : Score<0, Row>;
  const float scale = 1 / std::sqrt(static_cast<float>(a.width));
  for (long row = begin, rows; row < end; row += rows) {
    const long head = row / per_head, sequence = head / a.kv_heads;
    rows = std::min({end - row, (head + 1) * per_head - row, kQueries});
    Query queries[kQueries];
    long most = 0;
    for (long r = 0; r < rows; ++r) {
      const long member = (row + r) % per_head, token = sequence * a.tokens + member / group;
      const long first = (token * a.heads + head % a.kv_heads * group + member % group) * a.width;
      const bool* visible = a.visible + token * a.slots;
      const bool same = r > 0 && queries[r - 1].visible == visible;
      const long count = same ? queries[r - 1].count : Counted(visible, a.slots);
      queries[r] = {a.queries + first, visible, scores.data() + r * room, a.mixed + first, count};
      std::fill_n(a.mixed + first, a.width, 0.0f);
      most = std::max(most, count);
    }
    const long before = (sequence * a.slots * a.kv_heads + head % a.kv_heads) * a.width;
    const Row* values = static_cast<const Row*>(a.values) + before;
    score(queries, rows, static_cast<const Row*>(a.keys) + before, stride, a.width, most);
    for (long r = 0; r < rows; ++r) Exponents(queries[r], scale);
    InBlocks<8>(rows, [&]<int ROWS>(long r) { Weigh<ROWS, Row>(queries + r); });
    for (long slot = 0; slot < most; slot += kMixedSlots) {
      const long last = std::min(most, slot + kMixedSlots);
      InBlocks<kMixedRows>(rows, [&]<int ROWS>(long r) { Mix<ROWS>(queries + r, values, stride, a.width, slot, last); });
    }
  }
}

constexpr Kernels kKernels = {Normalize, Round, Int8Rows, FloatRows<float>, FloatRows<Bfloat16>, FloatColumns<float>, FloatColumns<Bfloat16>,
                              Attend<float>, Attend<Bfloat16>};
