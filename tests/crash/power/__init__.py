"""A disk that loses its power, and what a daemon may have promised before."""
