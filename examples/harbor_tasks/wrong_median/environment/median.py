import sys

numbers = sorted(sys.argv[1:])
print(numbers[len(numbers) // 2])
