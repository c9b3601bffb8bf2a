"""The master service: carries out what ``membership.master`` decides."""
