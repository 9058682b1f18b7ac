"""What a rank does and when: marks in a file that outlives it, and timelines made from them."""
