HEIGHTS = [0, 2, 5, 7, 5, 2]
