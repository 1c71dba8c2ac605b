from tide.table import HEIGHTS


def main():
    import sys

    print(HEIGHTS[int(sys.argv[1]) % len(HEIGHTS)]
