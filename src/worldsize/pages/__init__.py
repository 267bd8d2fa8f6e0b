"""Self-contained HTML pages: one file each, without requests, readable on phones, in the dark and on paper.

A page is a template below `templates/` that extends `base.html`; all share the stylesheet `static/page.css`. Values are
escaped everywhere, so a name such as ``<script>`` appears as text. Read `render` first; its functions are available from
this package.
"""

from worldsize.pages.render import Rows as Rows
from worldsize.pages.render import Table as Table
from worldsize.pages.render import bar as bar
from worldsize.pages.render import data_uri as data_uri
from worldsize.pages.render import fragment as fragment
from worldsize.pages.render import render as render
from worldsize.pages.render import script as script
