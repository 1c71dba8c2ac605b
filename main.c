#include <stdio.h>
int main(void) { long s = 0; for (long i = 0; i < 3000000; i++) s += i ^ (s >> 3); printf("%ld\n", s); return 0; }
