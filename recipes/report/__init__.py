"""What a sweep shows: points read from its folder, figures of them, one self-contained page."""

from recipes.report.write import write_report

__all__ = ["write_report"]
