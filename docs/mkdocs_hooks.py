"""What `make docs` adds to the pages: docstrings below each group of api.md, and the pictures."""

import os
import re

from mkdocs.structure.files import File

_RESULTS = 'benchmarks/results'


def on_files(files, config):
    """Takes along the benchmarks' pictures, which are outside of docs/."""
    folder = os.path.join(os.path.dirname(config['config_file_path']), _RESULTS)
    for name in sorted(os.listdir(folder)):
        if name.endswith('.png'):
            files.append(File.generated(
                config, 'results/' + name, abs_src_path=os.path.join(folder, name)))
    return files


def on_page_markdown(markdown, page, **unused):
    """Links to the pictures where they are now; asks mkdocstrings for what api.md lists."""
    markdown = markdown.replace('](../%s/' % _RESULTS, '](results/')
    if page.file.src_uri != 'api.md':
        return markdown
    return re.sub(r'((?:^- `\w+`.*\n?)+)', lambda group: group.group(1) + ''.join(
        '\n::: towers.%s\n' % name
        for name in re.findall(r'^- `(\w+)`', group.group(1), re.MULTILINE)), markdown,
                  flags=re.MULTILINE)
