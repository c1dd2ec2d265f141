#include "kvflash.h"
int main() { kvf_init(0); return 0; }
