import sys; sys.path.insert(0, "/work/src")
import calc
def test_add(): assert calc.add(1, 2) == 3
def test_fib(): assert calc.fib(10) == 55
