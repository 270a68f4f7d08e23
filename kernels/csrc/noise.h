/* Counter-based noise: Philox 4x32-10 over whole rows, as noise.py defines it.  Included once per instruction set.
 *
 * The logarithms are left to the caller, so that every path takes them from the same library. */

/* Blocks of four tokens that are made together: enough of them for the loops to become vectors. */
enum { GROUP = 32, PHILOX_ROUNDS = 10 };

/* words[j][i]: word j of block first + i, which belongs to token 4 * (first + i) + j. */
INLINE void philox(uint64_t seed, uint32_t position, uint32_t first, uint32_t words[4][GROUP]) {
  for (int i = 0; i < GROUP; i++) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = first + (uint32_t)i, c1 = position, c2 = 0, c3 = 0;
    _Pragma("GCC unroll 10")
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
      uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
      c0 = (uint32_t)(b >> 32) ^ c1 ^ key0;
      c1 = (uint32_t)b;
      c2 = (uint32_t)(a >> 32) ^ c3 ^ key1;
      c3 = (uint32_t)a;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    words[0][i] = c0;
    words[1][i] = c1;
    words[2][i] = c2;
    words[3][i] = c3;
  }
}

/* The midpoint keeps it off 0 and 1. */
INLINE double uniform(uint32_t word) { return ((double)word + 0.5) * 0x1p-32; }

/* out: [count, vocab], the numbers in (0, 1) that the noise of each position and token is made from. */
TARGET static void uniforms(uint64_t seed, const int64_t *positions, int64_t count, int64_t vocab, double *out) {
  uint32_t words[4][GROUP];
  double row[4 * GROUP];
  for (int64_t p = 0; p < count; p++) {
    for (int64_t token = 0; token < vocab; token += 4 * GROUP) {
      philox(seed, (uint32_t)positions[p], (uint32_t)(token / 4), words);
      for (int i = 0; i < GROUP; i++)
        for (int j = 0; j < 4; j++) row[4 * i + j] = uniform(words[j][i]);
      int64_t left = vocab - token < 4 * GROUP ? vocab - token : 4 * GROUP;
      memcpy(out + p * vocab + token, row, sizeof(double) * (size_t)left);
    }
  }
}

/* A number that the Gumbel noise of this word does not exceed: -log(-log u) <= -log(1 - u), and 1 - u, which is
 * (~word + 0.5) / 2**32, is no less than the power of two below it.  The last summand covers all roundings. */
INLINE float most_noise(uint32_t word) {
  union { float value; int32_t bits; } rest = {(float)(int32_t)(~word >> 1) * 2.0f + 0.5f};
  return (float)(32 + 127 - (rest.bits >> 23)) * 0.69314718f + 1e-3f;
}

/* Finds the tokens whose score plus noise may reach `floor`.  Their numbers go to tokens, ascending, and what their
 * noise is made from to out; both have room for vocab.  Returns how many they are. */
TARGET static int64_t contenders(uint64_t seed, int64_t position, const float *scores, int64_t vocab, float floor,
                                 int64_t *tokens, double *out) {
  uint32_t words[4][GROUP];
  int32_t reached[4][GROUP];
  float row[4][GROUP];
  int64_t found = 0;
  for (int64_t first = 0; first < vocab; first += 4 * GROUP) {
    int width = (int)(vocab - first < 4 * GROUP ? vocab - first : 4 * GROUP);
    philox(seed, (uint32_t)position, (uint32_t)(first / 4), words);
    if (width == 4 * GROUP) {
      for (int i = 0; i < GROUP; i++)
        for (int j = 0; j < 4; j++) row[j][i] = scores[first + 4 * i + j];
    } else {
      for (int t = 0; t < 4 * GROUP; t++) row[t % 4][t / 4] = t < width ? scores[first + t] : -INFINITY;
    }
    int32_t any = 0;
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < GROUP; i++) any |= reached[j][i] = row[j][i] + most_noise(words[j][i]) >= floor;
    for (int t = 0; any && t < width; t++) {
      if (!reached[t % 4][t / 4]) continue;
      tokens[found] = first + t;
      out[found++] = uniform(words[t % 4][t / 4]);
    }
  }
  return found;
}
