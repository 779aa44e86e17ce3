/* linear.c as a program: one call out of a file, its output into another; for CPUs that are emulated.
 *
 * linear_program                 prints the width of panels
 * linear_program INPUT OUTPUT    INPUT: integers as in `main`, then what they are the sizes of
 */
#include "../../kernels/csrc/linear.c"

#include <stdio.h>
#include <stdlib.h>

static void *read_bytes(FILE *file, int64_t size) {
    void *bytes = size ? malloc(size) : NULL;
    if (size && fread(bytes, 1, size, file) != (size_t)size) exit(2);
    return bytes;
}

int main(int argc, char **argv) {
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
