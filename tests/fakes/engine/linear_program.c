/* linear.c and low_rank.c as a program: one call out of a file, its output into another; for CPUs that are emulated.
 *
 * linear_program                          prints the width of panels
 * linear_program INPUT OUTPUT             INPUT: integers as in `main`, then what they are the sizes of
 * linear_program low_rank INPUT OUTPUT    INPUT: integers as in `low_rank`, then bytes in the order of `low_rank`
 */
#include "../../../kernels/csrc/linear.c"
#include "../../../kernels/csrc/low_rank.c"

#include <stdio.h>
#include <stdlib.h>

static void *read_bytes(FILE *file, int64_t size) {
    void *bytes = size ? malloc(size) : NULL;
    if (size && fread(bytes, 1, size, file) != (size_t)size) exit(2);
    return bytes;
}

#define MOST 8 /* spans, and parts */

/* Compute adapters' products. A span has 6 integers: 5 of its fields and the bytes of A; a part has 7: 4 of its
 * fields and the bytes of B, gains and shifts. */
static int low_rank(const char *input, const char *output) {
    int64_t n[9], s[MOST][6], p[MOST][7];
    low_rank_span spans[MOST];
    low_rank_part parts[MOST];
    FILE *from = fopen(input, "rb"), *to = fopen(output, "wb");
    if (!from || !to || fread(n, sizeof n[0], 9, from) != 9 || n[5] > MOST || n[6] > MOST) return 2;
    if (fread(s, sizeof s[0], n[5], from) != (size_t)n[5] || fread(p, sizeof p[0], n[6], from) != (size_t)n[6]) return 2;
    low_rank_call call = {
        .type = n[0], .w_type = n[1], .num_threads = n[2], .depth = n[3], .x_stride = n[3], .out_stride = n[4],
        .num_spans = n[5], .x = read_bytes(from, n[7]), .out = read_bytes(from, n[8]), .spans = spans, .parts = parts,
    };
    for (int i = 0; i < n[5]; i++)
        spans[i] = (low_rank_span){s[i][0], s[i][1], s[i][2], s[i][3], s[i][4], read_bytes(from, s[i][5])};
    for (int i = 0; i < n[6]; i++) {
        parts[i] = (low_rank_part){p[i][0], p[i][1], p[i][2], p[i][3], read_bytes(from, p[i][4])};
        parts[i].gains = read_bytes(from, p[i][5]), parts[i].shifts = read_bytes(from, p[i][6]);
    }
    return baton_low_rank(&call) || fwrite(call.out, 1, n[8], to) != (size_t)n[8] || fclose(to);
}

int main(int argc, char **argv) {
    if (argc == 4) return low_rank(argv[2], argv[3]);
    if (argc < 3) return printf("%d\n", baton_panel()) < 0;
    int64_t n[23];
    FILE *from = fopen(argv[1], "rb"), *to = fopen(argv[2], "wb");
    if (!from || !to || fread(n, sizeof n[0], 23, from) != 23) return 2;
    void *bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = read_bytes(from, n[15 + i]);
    linear_call call = {
        .x_type = n[0], .w_type = n[1], .out_type = n[2], .num_threads = n[3], .gated = n[4],
        .num_rows = n[5], .num_columns = n[6], .depth = n[7], .x_stride = n[8], .out_stride = n[9],
        .group = n[10], .scales_type = n[11], .minima_type = n[12], .factors_type = n[13], .fine = n[14],
        .x = bytes[0], .w = bytes[1], .scales = bytes[2], .bias = bytes[3], .group_scales = bytes[4],
        .group_minima = bytes[5], .scale_factors = bytes[6], .minimum_factors = bytes[7],
    };
    int64_t size = call.num_rows * call.num_columns * (int64_t)sizeof(float);
    call.out = malloc(size);
    return baton_linear(&call) || fwrite(call.out, 1, size, to) != (size_t)size || fclose(to);
}
