/* Measures entropy decoding alone, the lower bound for every decoder. Reads names of JPEG files from stdin; for each line
   "go", decodes all of them and prints the thread's CPU time in microseconds. Used by benchmarks/decoder.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jpeglib.h>

typedef struct {
    unsigned char *data;
    unsigned long size;
} image;

static image read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    image p = {NULL, 0};
    if (!file || fseek(file, 0, SEEK_END)) exit(66);
    p.size = (unsigned long)ftell(file);
    p.data = malloc(p.size);
    rewind(file);
    if (fread(p.data, 1, p.size, file) != p.size) exit(66);
    fclose(file);
    return p;
}

static void entropy(const image *p) {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, p->data, p->size);
    jpeg_read_header(&jpeg, TRUE);
    jpeg_read_coefficients(&jpeg);
    jpeg_destroy_decompress(&jpeg);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

int main(void) {
    static image images[1 << 16];
    char line[4096];
    int count = 0;
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strcmp(line, "go") != 0) {
            if (count == 1 << 16) return 64;
            images[count++] = read_file(line);
            continue;
        }
        const double start = now();
        for (int i = 0; i < count; i++) entropy(images + i);
        printf("%.1f\n", now() - start);
        fflush(stdout);
    }
    return 0;
}
