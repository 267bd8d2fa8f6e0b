"""Read a folder of images as people have them: class folders at any depth, tables of labels, names with the class in them.

`read` takes an inventory, collects each form of evidence (`folders`, `label_tables`, `file_names`), and chooses: labels that
two forms agree on, else the form that says more; where two contradict each other it raises `Unclear`, which names the flag
that decides. Nothing is written, moved or copied.
"""

from worldsize.data.layouts.choose import read as read
from worldsize.data.layouts.reading import Hints as Hints
from worldsize.data.layouts.reading import Reading as Reading
from worldsize.data.layouts.reading import Row as Row
from worldsize.data.layouts.reading import Unclear as Unclear
