"""What operations, collectives and transfers cost: records of devices and links, and times that follow from them."""
