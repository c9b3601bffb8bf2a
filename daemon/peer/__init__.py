"""The peer service: carries out what ``membership.peer`` decides, beside the trainer."""
