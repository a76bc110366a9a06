/* copy.c: bytes copied and summed in one go, where the processor has AVX2: each is read once, and not a
 * second time for the sum.
 *
 * The sum is XXH3-64 with its own secret: what its specification says of inputs of more than 240 bytes, in
 * vectors of 256 bits. The header of xxHash is compiled for any x86-64, and has no place for the copy.
 * tests/unit/test_record.c compares the two.
 */
#include "mem/hash.h"
#include "store/store.h"

static uint64_t plain(void *to, const void *from, size_t n) {
    const uint64_t sum = XXH3_64bits(from, n);
    memcpy(to, from, n);
    return sum;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
enum { STRIPE = 64, STRIPES = 16 /* of a block, after which the sums are stirred */ };
enum { LONG = 241, SECRET_BYTES = 192, AHEAD = 1 << 10 };
static const uint32_t prime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
static const uint64_t prime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                   0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

AVX2 static inline __m256i load(const void *from) {
    return _mm256_loadu_si256(from);
}

/* Half a stripe: its bytes to their place, and into four of the eight sums. */
AVX2 static inline __m256i add(__m256i sums, uint8_t *to, const uint8_t *from, const uint8_t *secret) {
    const __m256i bytes = load(from), mixed = _mm256_xor_si256(bytes, load(secret));
    _mm256_storeu_si256((__m256i *)to, bytes);
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sums, product), _mm256_shuffle_epi32(bytes, 0x4E));
}

AVX2 static inline __m256i stir(__m256i sums, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(prime32[0]);
    const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), load(secret));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

static uint64_t word(const uint8_t *at) {
    uint64_t w;
    memcpy(&w, at, sizeof w);
    return w;
}

__extension__ typedef unsigned __int128 wide_word;

static uint64_t folded(uint64_t a, uint64_t b) {
    const wide_word product = (wide_word)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t sums[8], const uint8_t *secret, size_t n) {
    uint64_t h = n * prime64[0];
    for (int i = 0; i < 8; i += 2)
        h += folded(sums[i] ^ word(secret + 11 + 8 * i), sums[i + 1] ^ word(secret + 19 + 8 * i));
    h = (h ^ (h >> 37)) * 0x165667919E3779F9;
    return h ^ (h >> 32);
}

/* n >= LONG. The last stripe is the last 64 bytes, whatever the one before it had of them. */
AVX2 static uint64_t wide(uint8_t *to, const uint8_t *from, size_t n) {
    uint8_t secret[SECRET_BYTES];
    XXH3_generateSecret_fromSeed(secret, 0);
    __m256i low =
        _mm256_setr_epi64x(prime32[2], (int64_t)prime64[0], (int64_t)prime64[1], (int64_t)prime64[2]);
    __m256i high = _mm256_setr_epi64x((int64_t)prime64[3], prime32[1], (int64_t)prime64[4], prime32[0]);
    const size_t n_stripes = (n - 1) / STRIPE;
    for (size_t i = 0; i < n_stripes; i++) {
        const uint8_t *key = secret + 8 * (i % STRIPES);
        const size_t at = STRIPE * i;
        _mm_prefetch((const char *)from + PAGED_MIN(at + AHEAD, n), _MM_HINT_T0);
        low = add(low, to + at, from + at, key);
        high = add(high, to + at + 32, from + at + 32, key + 32);
        if (i % STRIPES < STRIPES - 1) continue;
        low = stir(low, secret + SECRET_BYTES - STRIPE);
        high = stir(high, secret + SECRET_BYTES - STRIPE + 32);
    }
    const uint8_t *key = secret + SECRET_BYTES - STRIPE - 7;
    low = add(low, to + n - STRIPE, from + n - STRIPE, key);
    high = add(high, to + n - STRIPE + 32, from + n - STRIPE + 32, key + 32);
    uint64_t sums[8];
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
    return merged(sums, secret, n);
}

uint64_t paged__copy_summed(void *to, const void *from, size_t n) {
    if (n >= LONG && (paged_cpu_flags() & PAGED_CPU_AVX2)) return wide(to, from, n);
    return plain(to, from, n);
}
#else
uint64_t paged__copy_summed(void *to, const void *from, size_t n) {
    return plain(to, from, n);
}
#endif
