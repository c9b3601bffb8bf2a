"""The master service: it carries out the decisions of ``membership.master``."""
